"""Programs: stream effects as a value.

A program is a tuple of effects in issue order, the order in which the host
issues them.  What runs when is decided by streams and events only:

    Stage   send the staged inputs to the device, on the main stream
    Launch  run an op on a stream; its results are allocated from that stream's memory
    Record  an event happens when the stream has done all that was issued to it so far
    Wait    what is issued to the stream from here on runs after the event
    Keep    the memory of a value stays out of reuse until the stream has done all issued to it by the drop
    Drop    the host lets go of a value: its memory may be reused by later launches on its home stream

Nothing else reaches a device.  The main stream is the caller's: inputs are
ready on it, and outputs are read on it.  All other streams belong to programs,
and every launch there follows the start of main.  A program compares by value
and prints like a jaxpr with its streams.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import evolve, field, frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.op import Op
from mla_fx.effects.step import Input as Input
from mla_fx.effects.step import avals_of, call, memory_of
from mla_fx.effects.validate import InputError

#: The stream that inputs are ready on and outputs are read on.
MAIN: Final = "main"


@frozen
class Launch:
    """Run `op` on `stream`; `tag` is the scope of the step that it was written in."""

    stream: str
    op: Op
    operands: tuple[str, ...]
    results: tuple[str, ...]
    tag: str = ""

    @property
    def where(self) -> str:
        """The scope and the op, for errors."""
        return f"{self.tag}, {self.op.name}" if self.tag else self.op.name

    def __str__(self) -> str:
        notes = [f"uses {name}" for name in self.op.uses]
        if self.op.communicates:
            notes.append(f"over {self.op.group_of()}")
        return f"{call(self)}    {', '.join(notes)}" if notes else call(self)


@frozen
class Stage:
    """Send `values`, inputs that come on the host, to the device, on the main stream."""

    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"stage {' '.join(self.values)}"


@frozen
class Record:
    """Record `event` on `stream`."""

    stream: str
    event: str

    def __str__(self) -> str:
        return f"record {self.event}"


@frozen
class Wait:
    """Make `stream` wait for `event`.  `why` is for the reader and does not count in comparisons."""

    stream: str
    event: str
    why: str = field(default="", eq=False)

    def __str__(self) -> str:
        return f"wait {self.event}    # {self.why}" if self.why else f"wait {self.event}"


@frozen
class Keep:
    """Keep the memory of `value` alive for `stream` (torch: `tensor.record_stream(stream)`)."""

    value: str
    stream: str

    def __str__(self) -> str:
        return f"keep {self.value}"


@frozen
class Drop:
    """Let go of `value`."""

    value: str

    def __str__(self) -> str:
        return f"drop {self.value}"


Effect = Launch | Stage | Record | Wait | Keep | Drop


def stream_of(effect: Effect) -> str | None:
    """The stream that an effect is issued to; None for a drop, which is the host's alone."""
    match effect:
        case Drop():
            return None
        case Stage():
            return MAIN
    return effect.stream


@frozen
class Program:
    """Stream effects in issue order, with what goes in and what comes out.

    `outputs` are names of values, read on the main stream at the end.  `tree`
    says how they are packed for the caller (a torch pytree spec), None for a
    plain tuple.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    effects: tuple[Effect, ...]
    name: str = "program"
    orchestration: str = ""
    tree: Any = None

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The launches, in issue order."""
        return tuple(effect for effect in self.effects if isinstance(effect, Launch))

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of all streams, the main stream first, then in order of appearance."""
        return tuple(dict.fromkeys([MAIN, *filter(None, map(stream_of, self.effects))]))

    def count(self, kind: type[Effect]) -> int:
        """How many effects of one kind the program has, as in `program.count(Keep)`."""
        return sum(isinstance(effect, kind) for effect in self.effects)

    def without(self, index: int) -> "Program":
        """The program with effect number `index` left out; whether that is still legal is for `check`."""
        if not 0 <= index < len(self.effects):
            raise IndexError(f"effect must be in 0..{len(self.effects) - 1}: got {index}")
        return evolve(self, effects=self.effects[:index] + self.effects[index + 1 :])

    def with_float(self, dtype: str) -> "Program":
        """The same program with every floating input in `dtype`; all else follows from the shape rules."""
        return evolve(self, inputs=tuple(evolve(put, aval=put.aval.with_float(dtype)) for put in self.inputs))

    def with_fixed(self, values: Mapping[str, tuple[int, ...]]) -> "Program":
        """The same program made for these integers of host inputs, by name; it takes no others.

        Raises `InputError` for a name that is no host input, or for another number of integers than it has.
        """
        unknown = set(values) - {put.name for put in self.inputs}
        if unknown:
            raise InputError(f"fixed: must name inputs of the program: got {', '.join(sorted(unknown))}")
        return evolve(self, inputs=tuple(evolve(put, fixed=values.get(put.name, put.fixed)) for put in self.inputs))

    def updatable(self) -> tuple[Launch, ...]:
        """The launches with integers on the host that change from step to step, in issue order.

        What such a launch was captured with holds for one replay: it is updated before each.
        """
        changing = {put.name for put in self.inputs if put.place == "host" and put.fixed is None}
        return tuple(launch for launch in self.launches if changing.intersection(launch.operands))

    def avals(self) -> dict[str, Aval]:
        """Shape and dtype of every value, by the shape rules; raises `ShapeError` or `KeyError`."""
        return avals_of(self.inputs, self.launches)

    def memory(self) -> dict[str, str]:
        """For every value, the value in whose memory it lies: itself, the first version of its state, or what it is a
        view of."""
        return memory_of((put.name for put in self.inputs), self.launches)

    def states(self) -> tuple[str, ...]:
        """The inputs that a launch writes, in place."""
        root = self.memory()
        written = {root[launch.operands[position]] for launch in self.launches for position in launch.op.written()}
        return tuple(put.name for put in self.inputs if put.name in written)

    def workspaces(self) -> frozenset[str]:
        """The workspaces that launches use."""
        return frozenset(name for launch in self.launches for name in launch.op.uses)

    def home(self) -> dict[str, str]:
        """For every value in memory that a launch allocates, the stream it is allocated on."""
        root = self.memory()
        made = {name: launch.stream for launch in self.launches for name in launch.results}
        return {name: made[memory] for name, memory in root.items() if memory in made}

    def spent(self) -> frozenset[str]:
        """Values that a launch makes and one launch takes, once, on the stream that they are allocated on.

        Nobody else ever sees such a value, so the launch that takes it may make a result in its memory: the result is
        allocated on the same stream, and what is on that stream comes later.
        """
        home, root = self.home(), self.memory()
        taken = Counter(name for launch in self.launches for name in launch.operands)
        taken.update(self.outputs)
        return frozenset(
            name
            for launch in self.launches
            for name in launch.operands
            if home.get(name) == launch.stream and taken[name] == 1 and root[name] == name
        )

    def __iter__(self) -> Iterator[Effect]:
        return iter(self.effects)

    def __str__(self) -> str:
        head = f"{self.name}    orchestration {self.orchestration}" if self.orchestration else self.name
        home = self.home()
        shown = [(home.get(e.value, MAIN) if isinstance(e, Drop) else stream_of(e) or MAIN, e) for e in self.effects]
        width = max(len(MAIN), *(len(stream) for stream, _ in shown)) if shown else len(MAIN)
        lines = [f"{stream:<{width}}  {effect}" for stream, effect in shown]
        return "\n".join([head, *lines, f"{MAIN:<{width}}  return {' '.join(self.outputs)}"])
