"""What a program costs on paper: counted from its effects and shapes, before anything runs.

What a device makes of it (time, bandwidth, the size of its allocator's blocks) is not known here.

Bytes on the wire.  W ranks of a group run a collective; each hands m bytes to the transport: the operands of the
collective, as they are.  So padding of a share counts, and the LSE beside an output, whose bits cross with it.  What
one rank then sends, and receives as much:

    all_gather   (W - 1) m          m to each other rank; a ring passes on as much
    all_to_all   (W - 1) m / W      each other rank's part, and its own stays
    all_to_all_v m + 8 (W - 1)      m at most, to others: what data decide; and to each the number of rows for it
    all_reduce   2 (W - 1) m / W    a ring: reduce-scatter, then all-gather, which no algorithm undercuts (P. Patarasu,
                                    X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
                                    J. Parallel Distrib. Comput. 69, 2009); the mean over ranks where W does not divide.
                                    In rank order it is as much: an all-to-all of m, then an all-gather of m / W

rounded up to bytes; nothing where W = 1.

Memory of values.  What launches allocate lives from its launch to its drop, or to the end where nothing drops it; a
view, and a state that is written in place, take none.  The peak is that of the issue order, since allocators give out
and take back memory as it is issued.  Not counted: what a keep holds back beyond the drop, which differs from run to
run, workspaces, and what a rule makes for itself.  What a block for all of them takes is `mla_fx.effects.memory`'s.

Work.  Multiply-adds of matrix products, by each op's `work`: `multiply_adds` takes the lengths that attention needs.

Chain.  Launches that run one after the other in every execution, by stream order and events: the longest row of them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from mla_fx.effects.aval import Aval, match
from mla_fx.effects.memory import plan
from mla_fx.effects.op import Meeting, Op
from mla_fx.effects.passes import defined, definition
from mla_fx.effects.program import Drop, Keep, Launch, Program, Record, Wait
from mla_fx.effects.step import Applied, Input, avals_of


@frozen
class Message:
    """What a collective moves, in bytes: `handed` by a rank to the transport, `sent` by it over the wire."""

    launch: Launch
    handed: int
    sent: int


@frozen
class Memory:
    """Bytes on one rank: inputs by what they are, and the most that values of the program take at once.

    `data` is what comes with every step, hidden states and what is staged.  `peak_at` is the launch of the peak;
    `planned` the bytes of the blocks in which each value has a place of its own while it lives.
    """

    parameters: int
    states: int
    data: int
    peak: int
    peak_at: Launch | None
    planned: int


@frozen
class Cost:
    """What a program costs: counts of effects, `messages` of its collectives, memory of a rank, and the `chain`."""

    launches: int
    records: int
    waits: int
    keeps: int
    messages: tuple[Message, ...]
    memory: Memory
    chain: int

    @property
    def sent(self) -> int:
        """Bytes that a rank sends, in all."""
        return sum(message.sent for message in self.messages)


def cost(program: Program) -> Cost:
    """What a program costs on paper; raises `ShapeError` or `KeyError` for one without shapes."""
    avals = program.avals()
    return Cost(
        launches=program.count(Launch),
        records=program.count(Record),
        waits=program.count(Wait),
        keeps=program.count(Keep),
        messages=tuple(_messages(program.launches, avals)),
        memory=_memory(program, avals),
        chain=chain(program),
    )


def multiply_adds(
    inputs: Iterable[Input], applied: Iterable[Applied], lengths: Mapping[str, Sequence[int]] | None = None
) -> int:
    """Of all equations of a step, or launches of a program, on a rank; of an op made of others, those of its parts.

    `lengths` are the host inputs by name, as in {"batch.query_lengths": (1,), "batch.history_lengths": (1024,)};
    raises `KeyError` where an attention takes one that is not there.
    """
    applied, given = tuple(applied), lengths or {}
    avals = avals_of(inputs, applied)
    return sum(_work(one, [avals[name] for name in one.operands], given) for one in applied)


def _work(one: Applied, avals: Sequence[Aval], lengths: Mapping[str, Sequence[int]]) -> int:
    op = one.op
    own = {to: lengths[name] for to, name in zip(op.operands, one.operands, strict=True) if name in lengths}
    if type(op).work is Op.work and defined(op):
        parts = definition(op, avals)
        return multiply_adds(parts.inputs, parts.equations, own)
    axes, _ = match(op.name, op.operands, avals)
    return op.work(axes, own)


def on_the_wire(meeting: Meeting, ranks: int, handed: int) -> int:
    """Bytes that a rank sends where each of `ranks` hands over `handed`.

    >>> [on_the_wire(meeting, 8, 1024) for meeting in ("all_gather", "all_to_all", "all_reduce")]
    [7168, 896, 1792]
    """
    others = ranks - 1
    match meeting:
        case "all_gather":
            return others * handed
        case "all_to_all":
            return -(-others * handed // ranks)
        case "all_to_all_v":
            return handed + 8 * others if others else 0
        case "all_reduce":
            return -(-2 * others * handed // ranks)


def _messages(launches: Iterable[Launch], avals: dict[str, Aval]) -> Iterable[Message]:
    for launch in launches:
        meeting, group = launch.op.communicates, launch.op.group_of()
        if meeting is not None:
            handed = launch.op.handed(*(avals[name] for name in launch.operands))
            yield Message(launch, handed, on_the_wire(meeting, group.size if group else 1, handed))


def _memory(program: Program, avals: dict[str, Aval]) -> Memory:
    inputs: dict[str, int] = defaultdict(int)
    for put in program.inputs:
        if put.place != "host":
            inputs[put.role] += put.aval.bytes_
    root = program.memory()
    now = peak = 0
    at = None
    for effect in program.effects:
        match effect:
            case Launch():
                now += sum(avals[name].bytes_ for name in effect.results if root[name] == name)
                if now > peak:
                    peak, at = now, effect
            case Drop():
                now -= avals[root[effect.value]].bytes_
    return Memory(inputs["parameter"], inputs["state"], inputs["data"], peak, at, plan(program).bytes_)


def chain(program: Program) -> int:
    """How many launches run one after the other at least, in every execution: the longest row of them."""
    longest: dict[str, int] = defaultdict(int)  # by stream, of what its next launch is behind
    events: dict[str, int] = {}
    for effect in program.effects:
        match effect:
            case Launch():
                longest[effect.stream] += 1
            case Record():
                events[effect.event] = longest[effect.stream]
            case Wait():
                longest[effect.stream] = max(longest[effect.stream], events.get(effect.event, 0))
    return max(longest.values(), default=0)  # what runs last may be on any stream
