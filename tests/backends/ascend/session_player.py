"""Plays sessions of small programs on a device: its streams, events, graphs, task groups, allocator and faults.

The values are those that the hostile machine plays (`tests.effects.sessions`), all ranks in one process and on the same
streams.  `mix` is torch's own operators.  `toys.Lengths` asks the fused attention of the device, with a workspace and
with lengths that are updated, over keys whose mean is their number.  A buffer is made ready by a copy from the host, as
a workspace is that an operator wants zeroed before it is first used.

What is let go of in no pool is taken by a neighbour: other tensors of the process, written at any time on a stream of
their own.  A session is wrong where a value differs, where a tensor of the neighbour was written, and where the device
refuses something or waits for good.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from attrs import define, field

from mla_fx.effects import (
    MAIN,
    Capture,
    Drop,
    Fill,
    Keep,
    Launch,
    Member,
    Read,
    Record,
    Release,
    Replay,
    Reserve,
    Run,
    Session,
    Update,
    Wait,
)
from mla_fx.effects.session import Action, Taken
from tests.backends.ascend.graphs import Attention
from tests.effects import toys

Values = dict[str, Any]  # of one rank, by name
_RANKS = range(toys.RANKS)
#: How often the neighbour writes behind each action.
_WRITES = 2
#: What a session calls so many bytes of workspace is as much as the attention below asks for.
_NEED = 64
_NEIGHBOUR = "of the neighbour"


class Counts(Attention):
    """Attention that gives lengths: scores are all the same, and the mean of the first n odd numbers is n."""

    def __init__(self) -> None:
        super().__init__()
        for tensor in self.given:
            tensor.zero_()
        self.given[2][..., 0] = 1 + 2 * torch.arange(self.keys)
        torch.npu.synchronize()

    def result(self, x: torch.Tensor, out: torch.Tensor, salt: int) -> torch.Tensor:
        """What `toys.lengths_rule` gives, with lengths as the device has them."""
        first, second = out[:, 0, 0, 0].to(x.dtype).unbind()
        return torch.remainder((2 * x + salt + first + 2 * second) * 31, 10007)


@define(eq=False)
class Task:
    """A launch that is updated, on one rank: where its operator writes, its workspace, its group and event."""

    out: list[torch.Tensor]
    workspace: torch.Tensor
    names: tuple[str, ...]  # of its operands on the host
    handle: Any
    event: Any


@define(eq=False)
class Life:
    """A capture, or the last run: what it has in memory."""

    member: Member
    values: list[Values]  # of each rank: its inputs, and at the end its outputs
    graph: Any = None
    tasks: dict[str, list[Task]] = field(factory=lambda: defaultdict(list))  # launch -> of each rank
    places: list[Values] | None = None  # where what it makes lies, if in no pool


class Player:
    """One play.  `given` and `states` are those of `mla_fx.backends.hostile_session.play`."""

    def __init__(
        self, session: Session, module: Any, given: Callable[..., Any], states: Mapping[str, Sequence[torch.Tensor]]
    ) -> None:
        self.session, self.module, self.given = session, module, given
        self.members = {one.name: one for one in session.members}
        self.one = {name: names[0] for names in session.shared for name in names}
        self.states = {name: [tensor.npu() for tensor in of_ranks] for name, of_ranks in states.items()}
        self.counts = Counts()
        self.streams: dict[str, Any] = {MAIN: module.current_stream()}
        self.events: dict[str, Any] = {}
        self.pools: dict[str, Any] = defaultdict(module.graph_pool_handle)
        self.sizes: dict[str, int] = defaultdict(int)
        self.buffers: dict[str, list[torch.Tensor]] = {}
        self.lives: dict[str, Life] = {}
        self.turns: dict[str, int] = defaultdict(int)
        self.reads: list[list[torch.Tensor]] = []
        self.pinned: list[torch.Tensor] = []
        self.neighbours: list[torch.Tensor] = []
        self.written = 0.0
        self.capturing: Any = None

    def play(self) -> tuple[list[list[torch.Tensor]], dict[str, list[torch.Tensor]]]:
        """What each `Read` reads, for all ranks, and the states at the end; raises what the device raises."""
        try:
            for action in self.session:
                self.act(action)
                self.write()
            self.module.synchronize()
        finally:
            self.module.set_stream(self.streams[MAIN])
        for tensor in self.neighbours:
            assert tensor.eq(self.written).all(), "a tensor of somebody else's was written"
        read = [[tensor.cpu() for tensor in of_ranks] for of_ranks in self.reads]
        return read, {name: [tensor.cpu() for tensor in of_ranks] for name, of_ranks in self.states.items()}

    def stream(self, name: str) -> Any:
        if name not in self.streams:
            self.streams[name] = self.module.Stream()
        return self.streams[name]

    def own(self, name: str) -> Any:
        """The stream of a program, other than its main."""
        return self.stream(f"of programs: {name}")

    # --- whoever else is there ---------------------------------------------------------

    def gives_back(self, tensors: list[torch.Tensor]) -> None:
        """The neighbour takes what the list has the last references to, once main gets here."""
        sizes = [tensor.nbytes // 8 for tensor in tensors]
        tensors.clear()
        self.neighbours += [torch.empty(size, dtype=torch.float64, device="npu") for size in sizes]
        self.stream(_NEIGHBOUR).wait_stream(self.streams[MAIN])

    def write(self) -> None:
        """The neighbour writes what it has, any time from now."""
        with self.module.stream(self.stream(_NEIGHBOUR)):
            for _ in range(_WRITES if self.neighbours else 0):
                self.written += 0.5
                for tensor in self.neighbours:
                    tensor.fill_(self.written)

    # --- the host ----------------------------------------------------------------------

    def act(self, action: Action) -> None:
        match action:
            case Reserve():
                self.grow(((action.buffer, action.size),))
            case Capture():
                self.capture(self.members[action.member])
            case Fill():
                life = self.lives[action.member]
                with self.module.stream(self.stream(action.stream)):
                    self.fill(life.values, life.member, action.takes)
            case Update():
                self.update(action)
            case Replay():
                self.turns[action.member] += 1
                with self.module.stream(self.stream(action.stream)):
                    self.lives[action.member].graph.replay()
            case Run():
                self.run(self.members[action.member], action.takes)
            case Read():
                with self.module.stream(self.stream(action.stream)):
                    self.reads.append([one[action.output].clone() for one in self.lives[action.member].values])
            case Drop():
                name, value = action.value.split(".", 1)
                self.gives_back([one.pop(value) for one in self.lives[name].values])
            case Release():
                self.module.synchronize()  # a graph that runs is not destroyed
                self.lives.pop(action.member).graph.reset()
            case Record():
                self.events[action.event] = self.stream(action.stream).record_event()
            case Wait():
                if action.event in self.events:
                    self.stream(action.stream).wait_event(self.events[action.event])

    def grow(self, asked: Sequence[tuple[str, int]]) -> None:
        """Buffers that are too small are let go of, and larger ones are made ready."""
        for name, size in asked:
            if size <= self.sizes[name]:
                continue
            self.sizes[name] = size
            self.gives_back(self.buffers.pop(name, []))
            count = -(-size * self.counts.workspace.nbytes // _NEED // 64) * 64
            zeros = torch.zeros(count, dtype=torch.uint8)
            self.buffers[name] = [torch.empty(count, dtype=torch.uint8, device="npu").copy_(zeros) for _ in _RANKS]

    def inputs(self, member: Member, staging: str = "") -> list[Values]:
        """Memory of the inputs of a member on each rank: states where they are, data in a buffer or by itself."""
        found: list[Values] = [{} for _ in _RANKS]
        for rank, values in enumerate(found):
            at = 0
            for put in member.program.inputs:
                state = self.one.get(f"{member.name}.{put.name}", f"{member.name}.{put.name}")
                if state in self.states:
                    values[put.name] = self.states[state][rank]
                elif put.place == "host":
                    values[put.name] = put.fixed
                elif staging:
                    memory = self.buffers[staging][rank][at : at + put.aval.bytes_]
                    values[put.name] = memory.view(torch.float64)
                    at += put.aval.bytes_
                else:
                    values[put.name] = torch.empty(put.aval.shape, dtype=torch.float64, device="npu")
        return found

    def data(self, member: Member) -> list[str]:
        names = [put.name for put in member.program.inputs if put.place != "host"]
        return [n for n in names if self.one.get(f"{member.name}.{n}", f"{member.name}.{n}") not in self.states]

    def fill(self, into: list[Values], member: Member, takes: tuple[Taken, ...]) -> None:
        """Copies to where the data of the next turn lies, on the current stream."""
        taken = dict(takes)
        for rank, name in itertools.product(_RANKS, self.data(member)):
            if name in taken:
                owner, output = taken[name].split(".", 1)
                source = self.lives[owner].values[rank][output]
            else:
                source = self.given(member.name, name, self.turns[member.name], rank).pin_memory()
                self.pinned.append(source)
            into[rank][name].copy_(source, non_blocking=True)

    # --- programs ----------------------------------------------------------------------

    def run(self, member: Member, takes: tuple[Taken, ...]) -> None:
        """Eagerly, on main; what the run before gave is let go of behind it."""
        self.grow(member.room)
        life = Life(member, self.inputs(member))
        self.fill(life.values, member, takes)
        names = [put.name for put in member.program.inputs if put.place == "host" and put.fixed is None]
        for rank, name in itertools.product(_RANKS, names):
            life.values[rank][name] = self.given(member.name, name, self.turns[member.name], rank)
        self.turns[member.name] += 1
        self.issue(life, self.streams[MAIN])
        before, self.lives[member.name] = self.lives.get(member.name), life
        if before is not None:
            self.gives_back([one.pop(name) for one in before.values for name in {*member.program.outputs} & {*one}])

    def capture(self, member: Member) -> None:
        """As a graph over its pool, or over memory that was made before and is let go of behind it."""
        life = Life(member, self.inputs(member, member.staging), self.module.NPUGraph())
        if not member.pool:
            made = [name for launch in member.program.launches for name in launch.results]
            life.places = [{name: torch.empty(toys.SIZE).double().npu() for name in made} for _ in _RANKS]
        self.module.synchronize()
        stream = self.stream("of captures")
        self.module.set_stream(stream)
        where = {"pool": self.pools[member.pool]} if member.pool else {}
        life.graph.capture_begin(**where, capture_error_mode="thread_local")
        try:
            self.grow(member.room)
            self.issue(life, stream)
        finally:
            self.module.set_stream(stream)
            with suppress(RuntimeError):  # what is half captured may have no end
                life.graph.capture_end()
            self.module.set_stream(self.streams[MAIN])
        self.lives[member.name] = life
        if life.places is not None:
            gone = [one.pop(name) for one in life.places for name in [*one] if name not in member.program.outputs]
            life.places = None
            self.gives_back(gone)

    def issue(self, life: Life, main: Any) -> None:
        """The effects of a program; at the end its values are inputs and outputs."""
        events: dict[str, Any] = {}
        streams = {name: main if name == MAIN else self.own(name) for name in life.member.program.streams}
        for effect in life.member.program.effects:
            match effect:
                case Launch():
                    self.module.set_stream(streams[effect.stream])
                    self.launch(life, effect)
                case Record():
                    events[effect.event] = streams[effect.stream].record_event()
                case Wait():
                    streams[effect.stream].wait_event(events[effect.event])
                case Keep():
                    for values in life.values:
                        values[effect.value].record_stream(streams[effect.stream])
                case Drop():
                    for values in life.values:
                        del values[effect.value]
        self.module.set_stream(main)
        kept = {*life.member.program.outputs, *(put.name for put in life.member.program.inputs)}
        life.values = [{name: value for name, value in one.items() if name in kept} for one in life.values]

    def launch(self, life: Life, launch: Launch) -> None:
        """A launch on all ranks, on the current stream."""
        operands = [[values[name] for name in launch.operands] for values in life.values]
        for rank in _RANKS:
            found = self.operate(life, launch, operands, rank)
            for k, name in enumerate(launch.results):
                owned = k not in launch.op.viewed() and k not in launch.op.written().values()
                if life.places is not None and owned:
                    found[k] = life.places[rank][name].copy_(found[k])
                life.values[rank][name] = found[k]

    def operate(self, life: Life, launch: Launch, operands: list[list[Any]], rank: int) -> list[Any]:
        """The results of a launch on a rank."""
        salt, mine = launch.op.salt, operands[rank]
        match launch.op:
            case toys.Lengths():
                return [self.attend(life, launch, mine, rank)]
            case toys.Exchange():
                return [toys.mix(*(operands[(rank + k) % toys.RANKS][0] for k in _RANKS), salt=salt)]
            case toys.Update():
                return [mine[0].copy_(toys.mix(*mine, salt=salt))]
            case toys.Fork():
                return [toys.mix(*mine, salt=salt), toys.mix(*mine, salt=salt + 1)]
            case toys.Peek():
                return [mine[0][:], toys.mix(*mine, salt=salt)]
            case toys.Asks():
                mine[0].tolist()
        return [toys.mix(*mine, salt=salt)]

    def attend(self, life: Life, launch: Launch, operands: list[Any], rank: int) -> torch.Tensor:
        """Attention with lengths; in a graph, where they are updated, as a group behind an event."""
        x, lengths = operands
        (buffer,) = launch.op.uses
        room = self.buffers[buffer][rank]
        out = [torch.empty_like(one) for one in self.counts.out]
        how = {"workspace": room, "out": out}
        if life.graph is None or lengths is not None:
            self.counts.call(lengths, **how)
        else:
            stream, event = self.module.current_stream(), self.module.ExternalEvent()
            event.wait(stream)
            event.reset(stream)
            self.module.graph_task_group_begin(stream)
            self.counts.call((1, 1), **how)
            handle = self.module.graph_task_group_end(stream)
            weak = [_unowned(one) for one in out]
            life.tasks[launch.results[0]].append(Task(weak, _unowned(room), launch.operands[1:], handle, event))
        return self.counts.result(x, out[0], launch.op.salt)

    def update(self, update: Update) -> None:
        """New lengths for a launch of a graph, and then it is let go."""
        name, turn = update.member, self.turns[update.member]
        for rank, task in enumerate(self.lives[name].tasks[update.launch]):
            (lengths,) = (self.given(name, put, turn, rank) for put in task.names)
            how = {"workspace": task.workspace, "out": task.out}
            self.counts.update((task.handle, task.event), lengths, self.stream(update.stream), **how)


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which this does not hold."""
    from torch_npu import _C

    made: torch.Tensor = _C._weak_ref_tensor(tensor)
    return made
