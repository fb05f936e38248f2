"""Programs on the streams and events of a torch device module: `torch.npu`, or any that has the same ones.

Every effect becomes the one call that it names:

    Launch   set_stream, where another stream was current; then the rule
    Record   event.record(stream)              Keep   tensor.record_stream(stream)
    Wait     stream.wait_event(event)          Drop   del

Rules create no stream and no event: they run on the stream that is current.
All ranks that this process runs are on one device, each with streams of its own.

The way in and out.  Inputs are ready on the stream that is current when the
program is called, outputs are read there.  So every rank's main stream waits
for the caller's, and at the end the caller's waits for every rank's main
stream, which by the law all others have joined.  Outputs are kept for the
caller's stream, since they were allocated on a rank's.  Integers are taken on
the host, where their values are checked, and go to the device from pinned memory.

Collectives of ranks in one process (in a group of processes they are launches
like any other, see `mla_fx.backends.distributed`).  Ranks meet on the stream s of the launch: each rank's s waits for
the s of all ranks.  A collective's rule is a generator that is asked once for
each rank, in rank order, with that rank's s current, round after round, with a
meeting before each round and behind the last:

    a round of None            ranks prepare: what they yielded the turn for is read by others in the next round
    a round of result tuples   the results, and the end

The meeting before a round makes the operands ready.  The one behind the last
makes them safe: to rank r's later effects on s, the others' reading of r's
operands is behind it like r's own, so that what the program orders behind the
launch on s (a drop, a write of a state) is behind them all.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, assert_never

import torch
from attrs import define, field, frozen

from mla_fx.backends.backend import Backend, Rule
from mla_fx.backends.inputs import DTYPES, ON_HOST
from mla_fx.effects import MAIN, Drop, Input, InputError, Keep, Launch, Program, Record, Wait

#: The generator that a collective's rule makes: see above.
Turns = Iterator[tuple[torch.Tensor, ...] | None]


@define(eq=False)
class Scratch:
    """Memory that the operators of one rank share, each only while it runs; the program keeps them in order.

    It grows to what the largest of them asks for, in the first step.  What it
    outgrew is kept, since an operator that is still running may be using it.
    """

    held: list[torch.Tensor] = field(factory=list)
    known: set[Hashable] = field(factory=set)

    def room(self, need: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Memory for an operator; `make` allocates what it needs at most, asked once for every `need`."""
        if need not in self.known:
            self.known.add(need)
            made = make()
            if not self.held or made.nbytes > self.held[-1].nbytes:
                self.held.append(made)
        return self.held[-1]


@frozen(eq=False)
class OnStreams:
    """The body of an executable on a device: flat inputs to flat outputs, rank after rank.

    `streams` has the device's stream for each rank and stream of the program, `events` its event for
    each rank and event.
    """

    streams: Mapping[tuple[int, str], Any]
    events: Mapping[tuple[int, str], Any]
    function: Callable[..., tuple[Any, ...]]

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        """Issue one step; the host does not wait for it."""
        return self.function(*leaves)


@frozen(eq=False)
class _Group:
    """The ranks' streams of one launch, where its collective runs."""

    device: Any
    streams: Sequence[Any]
    arrived: Sequence[Any]  # an event for each rank; the first one's says that all have

    def meet(self) -> None:
        """What any of the streams is given from here on runs after all that any was given before."""
        if len(self.streams) == 1:
            return
        first = self.streams[0]
        for stream, event in zip(self.streams[1:], self.arrived[1:], strict=True):
            event.record(stream)
            first.wait_event(event)
        self.arrived[0].record(first)
        for stream in self.streams[1:]:
            stream.wait_event(self.arrived[0])

    def run(self, rule: Callable[..., Turns], operands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Results of all ranks."""
        turns = rule(operands)
        self.meet()
        while True:
            results = []
            for stream in self.streams:
                self.device.set_stream(stream)
                results.append(next(turns))
            self.meet()
            if results[0] is not None:
                return results


def on_streams(program: Program, backend: Backend, device: str) -> tuple[OnStreams, str]:
    """The body of a program as generated Python, and its source; `device` is a type, as in "npu"."""
    writer = _Writer(program, backend, device, torch.get_device_module(device))
    source = writer.write()
    exec(compile(source, f"<{program.name} on {device}>", "exec"), writer.scope)
    return OnStreams(writer.streams, writer.events, writer.scope["body"]), source


def arrive(tensor: torch.Tensor, *, device: str) -> torch.Tensor:
    """An integer input on the device.  The copy starts from pinned memory, so the host need not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True)


def _elsewhere(put: Input, rank: int, leaf: torch.Tensor, device: str) -> None:
    raise InputError(f"{put.name} of rank {rank}: must be on {device}, as Backend.put moves it: got {leaf.device}")


@define(eq=False)
class _Writer:
    """Writes the body, effect by effect; `current` is the stream that the written code has made current."""

    program: Program
    backend: Backend
    kind: str
    device: Any
    scope: dict[str, Any] = field(factory=dict)
    names: dict[str, str] = field(factory=dict)
    numbers: dict[str, int] = field(factory=dict)
    called: dict[tuple[int, str], str] = field(factory=dict)
    lines: list[str] = field(factory=list)
    streams: dict[tuple[int, str], Any] = field(factory=dict)
    events: dict[tuple[int, str], Any] = field(factory=dict)
    scratch: dict[tuple[int, str], Scratch] = field(factory=dict)
    current: tuple[int, str] | None = None

    @property
    def ranks(self) -> range:
        return self.backend.here

    def write(self) -> str:
        """The source of `body`."""
        inputs, outputs = self.program.inputs, self.program.outputs
        self.names = {put.name: f"x{number}" for number, put in enumerate(inputs)}
        self.numbers = {name: number for number, name in enumerate(self.program.streams)}
        for rank in self.ranks:
            for name in self.numbers:
                self.streams[rank, name] = self.scope[self.stream(rank, name)] = self.device.Stream()
        arguments = ", ".join(f"{self.names[put.name]}_{rank}" for put in inputs for rank in self.ranks)
        self.begin()
        for effect in self.program.effects:
            self.effect(effect)
        self.end()
        result = "".join(f"{self.names[name]}_{rank}, " for name in outputs for rank in self.ranks)
        ahead = [f"    {line}" for line in self.checks()]
        return "\n".join(
            [
                f"def body({arguments}):",
                *ahead,
                "    caller = current_stream()",
                "    try:",
                *(f"        {line}" for line in self.lines),
                "    except BaseException:",
                "        synchronize()  # nothing that was issued outlives the tensors it reads",
                "        raise",
                "    finally:",
                "        set_stream(caller)",
                f"    return ({result})",
            ]
        )

    def checks(self) -> list[str]:
        """Refuse what is on another device, before anything is issued."""
        self.scope |= {"elsewhere": _elsewhere, "arrive": partial(arrive, device=self.kind)}
        self.scope |= {name: getattr(self.device, name) for name in ("current_stream", "set_stream", "synchronize")}
        lines = []
        for number, put in enumerate(self.program.inputs):
            if put.aval.dtype != "host" and DTYPES[put.aval.dtype] not in ON_HOST:
                self.scope[f"i{number}"] = put
                for rank in self.ranks:
                    leaf, wanted = f"x{number}_{rank}", repr(self.kind)
                    lines.append(f"if {leaf}.device.type != {wanted}: elsewhere(i{number}, {rank}, {leaf}, {wanted})")
        return lines

    def begin(self) -> None:
        """Every rank's main stream waits for the caller's; integers are sent after it."""
        start = self.event(self.ranks[0], "<start>")
        self.say(f"{start}.record(caller)")
        for rank in self.ranks:
            self.say(f"{self.stream(rank, MAIN)}.wait_event({start})")
        for put in self.program.inputs:
            if put.aval.dtype != "host" and DTYPES[put.aval.dtype] in ON_HOST:
                for rank in self.ranks:
                    self.enter(rank, MAIN)
                    leaf = f"{self.names[put.name]}_{rank}"
                    self.say(f"{leaf} = arrive({leaf})")

    def end(self) -> None:
        """The caller's stream waits for every rank's main stream; outputs are kept for it."""
        for rank in self.ranks:
            self.say(f"{self.event(rank, '<end>')}.record({self.stream(rank, MAIN)})")
            self.say(f"caller.wait_event({self.event(rank, '<end>')})")
        home, root = self.program.home(), self.program.memory()
        for name in dict.fromkeys(self.program.outputs):
            if root[name] in home:
                for rank in self.ranks:
                    self.say(f"{self.names[name]}_{rank}.record_stream(caller)")

    def effect(self, effect: Launch | Record | Wait | Keep | Drop) -> None:
        """One effect on every rank."""
        if isinstance(effect, Launch):
            self.names.update({name: f"v{len(self.names) + k}" for k, name in enumerate(effect.results)})
            together = effect.op.communicates and self.backend.group is None
            return self.together(effect) if together else self.launch(effect)
        for rank in self.ranks:
            match effect:
                case Record():
                    self.say(f"{self.event(rank, effect.event)}.record({self.stream(rank, effect.stream)})")
                case Wait():
                    self.say(f"{self.stream(rank, effect.stream)}.wait_event({self.event(rank, effect.event)})")
                case Keep():
                    value = f"{self.names[effect.value]}_{rank}"
                    self.say(f"{value}.record_stream({self.stream(rank, effect.stream)})")
                case Drop():
                    self.say(f"del {self.names[effect.value]}_{rank}")
                case _:
                    assert_never(effect)
        return None

    def launch(self, launch: Launch) -> None:
        for rank in self.ranks:
            self.enter(rank, launch.stream)
            shared = {name: self.scratch.setdefault((rank, name), Scratch()) for name in launch.op.uses}
            function = self.known(launch, partial(self.backend.bound(launch, rank), **shared))
            self.say(f"{self.results(launch, rank)}= {function}({self.operands(launch, rank)})")

    def together(self, launch: Launch) -> None:
        streams = [self.streams[rank, launch.stream] for rank in self.ranks]
        group = _Group(self.device, streams, [self.device.Event() for _ in self.ranks])
        function = self.known(launch, partial(group.run, self.backend.bound(launch)))
        left = "".join(f"({self.results(launch, rank)}), " for rank in self.ranks)
        right = "".join(f"({self.operands(launch, rank)},), " for rank in self.ranks)
        self.say(f"{left}= {function}([{right}])")
        self.current = (self.ranks[-1], launch.stream)

    # --- names in the written code ---------------------------------------------

    def say(self, line: str) -> None:
        self.lines.append(line)

    def stream(self, rank: int, name: str) -> str:
        return f"s{self.numbers[name]}_{rank}"

    def event(self, rank: int, name: str) -> str:
        """An event is made once and recorded anew in every step."""
        if (rank, name) not in self.events:
            self.called[rank, name] = f"e{len(self.events)}_{rank}"
            self.events[rank, name] = self.scope[self.called[rank, name]] = self.device.Event()
        return self.called[rank, name]

    def known(self, launch: Launch, function: Rule) -> str:
        name = f"{launch.op.name}_{len(self.scope)}"
        self.scope[name] = function
        return name

    def enter(self, rank: int, stream: str) -> None:
        if self.current != (rank, stream):
            self.say(f"set_stream({self.stream(rank, stream)})")
            self.current = (rank, stream)

    def operands(self, launch: Launch, rank: int) -> str:
        return ", ".join(f"{self.names[name]}_{rank}" for name in launch.operands)

    def results(self, launch: Launch, rank: int) -> str:
        return "".join(f"{self.names[name]}_{rank}, " for name in launch.results)
