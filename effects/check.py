"""The law of a program, checked with vector clocks.

The checker reads a program as a device would: streams run their effects in
issue order, a wait lets a stream see all that the recording stream had seen.
"a runs before b" below means: by the clocks, in every execution.

    1  every operand is produced before it is consumed
    2  conflicting accesses to a state or a workspace are ordered
    3  memory outlives its use: a use on another stream than the home stream runs before the next launch
       on the home stream after the drop, or a stream that the memory is kept for has seen it at the drop
    4  an event is recorded once, before it is waited for, and somebody waits for it
    5  every stream has joined the main stream at the end, one that only waits too
    6  collectives of a rank run in one order, whatever their groups; those of a group that is declared
       independent in one order among themselves

A view is memory of what it is a view of and shows that one's content, so what
is said of one of them is said of both: it is there when the other is, a write
through either replaces both, and either keeps the memory in use.

Rule 0 is form: names, shapes, places.  Nothing is shared with the scheduler,
so that one can be wrong without the other.

How clocks decide.  Every effect on a stream is a tick of that stream; a stream
has seen (s, t) when all up to tick t of stream s runs before what it is given
next.  A record remembers what its stream had seen, a wait adds that to what the
waiting stream has seen.  So "use a runs before use b" is: what b's stream had
seen when b was issued includes a's tick.  No other order exists on a device.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from attrs import define, field, frozen

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.program import MAIN, Drop, Effect, Input, Keep, Launch, Program, Record, Stage, Wait


@frozen
class Violation:
    """One breach: the rule, both effects, of a session both actions (None where there is no second), what is missing.

    `order` is True when an order is missing, so that some execution goes
    wrong; False when the program is malformed or carries an idle effect.
    """

    rule: int
    message: str
    first: Any = None
    second: Any = None
    order: bool = False

    def __str__(self) -> str:
        return f"rule {self.rule}: {self.message}"


class LawError(ValueError):
    """A program that breaks the law.  `violations` has every breach, in issue order of their discovery."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        self.violations = violations
        super().__init__("\n".join(map(str, violations)))

    def __reduce__(self) -> tuple[type["LawError"], tuple[tuple[Violation, ...]]]:
        # An exception is rebuilt from its `args`, which here are the message and not what made it.
        return LawError, (self.violations,)


def check(program: Program) -> None:
    """Raise `LawError` unless the program is legal."""
    if found := violations(program):
        raise LawError(found)


def violations(program: Program) -> tuple[Violation, ...]:
    """Every breach of the law; empty for a legal program."""
    checker = _Checker(program)
    checker.walk()
    return tuple(checker.found)


_Clock = Mapping[str, int]


@frozen(eq=False)
class _Use:
    """A launch, with the tick of its stream and what its stream had seen before it."""

    launch: Launch
    tick: int
    seen: _Clock

    def before(self, other: "_Use") -> bool:
        return other.seen.get(self.launch.stream, 0) >= self.tick

    def __str__(self) -> str:
        named = self.launch.results or self.launch.operands
        return f"{self.launch.op.name} ({named[0]}) on {self.launch.stream}"


@define
class _Memory:
    """One block: who allocated it, who uses it, which version of it is the newest."""

    name: str
    newest: str
    home: str | None = None  # None: an input, owned by the caller
    writer: _Use | None = None
    uses: dict[_Use, None] = field(factory=dict)  # in order
    kept: dict[str, Keep] = field(factory=dict)
    covered: list[_Clock] = field(factory=list)  # what each keeping stream had seen at the drop
    dropped: Drop | None = None


@define(eq=False)
class _Checker:
    program: Program
    found: list[Violation] = field(factory=list)
    clocks: dict[str, dict[str, int]] = field(factory=lambda: {MAIN: {MAIN: 1}})  # tick 1: inputs are ready
    inputs: dict[str, Input] = field(factory=dict)
    ready: dict[str, int] = field(factory=dict)  # input -> tick of main from which it can be read
    avals: dict[str, Aval | None] = field(factory=dict)
    memory: dict[str, _Memory] = field(factory=dict)  # by value
    shown: dict[str, str] = field(factory=dict)  # view -> the value whose content it shows
    producer: dict[str, _Use] = field(factory=dict)
    workspaces: dict[str, _Use] = field(factory=dict)  # its last user
    collectives: dict[str | None, _Use] = field(factory=dict)  # independent group, or None for all others -> the last
    groups: dict[str, Launch] = field(factory=dict)  # name -> the first to run over it
    events: dict[str, tuple[Record, _Clock]] = field(factory=dict)
    waited: set[str] = field(factory=set)
    waiting: dict[str, tuple[Wait, int]] = field(factory=dict)  # stream -> its last wait, and the tick of that
    last: dict[str, _Use] = field(factory=dict)  # stream -> last launch
    free: dict[str, list[_Memory]] = field(factory=lambda: defaultdict(list))  # stream -> dropped since its last launch

    def walk(self) -> None:
        for put in self.program.inputs:
            if put.name in self.avals:
                self.breach(0, f"input {put.name} is there twice")
            self.inputs[put.name] = put
            if put.place != "staged":
                self.ready[put.name] = 1
            self.avals[put.name] = put.aval
            self.memory[put.name] = _Memory(put.name, put.name)
        for effect in self.program.effects:
            match effect:
                case Launch():
                    self.launch(effect)
                case Stage():
                    self.stage(effect)
                case Record():
                    self.record(effect)
                case Wait():
                    self.wait(effect)
                case Keep():
                    self.keep(effect)
                case Drop():
                    self.drop(effect)
        self.end()

    def breach(self, rule: int, message: str, first: Effect | None = None, second: Effect | None = None) -> None:
        self.found.append(Violation(rule, message, first, second))

    def missing(self, rule: int, message: str, first: _Use, second: _Use | None) -> None:
        there = str(second) if second else "the end of main"
        text = f"{message}; missing order: {first} -> {there}"
        self.found.append(Violation(rule, text, first.launch, second.launch if second else None, order=True))

    def clock(self, stream: str) -> dict[str, int]:
        return self.clocks.setdefault(stream, {})

    def tick(self, stream: str) -> int:
        """The next tick of a stream, which from now on has seen it."""
        clock = self.clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    # --- one effect each ---------------------------------------------------

    def launch(self, launch: Launch) -> None:
        seen = dict(self.clock(launch.stream))
        use = _Use(launch, self.tick(launch.stream), seen)
        blocks = self.operands(launch, use)
        self.shared(launch, use)
        self.reuse(launch, use)
        self.results(launch, use, blocks)
        self.last[launch.stream] = use

    def stage(self, stage: Stage) -> None:
        """From here on, main sees these inputs."""
        tick = self.tick(MAIN)
        for name in stage.values:
            put = self.inputs.get(name)
            if put is None or put.place != "staged":
                self.breach(0, f"'{stage}' must name inputs that are staged: got {name}", None, stage)
            elif name in self.ready:
                self.breach(0, f"input {name} is staged twice, the second time by '{stage}'", None, stage)
            self.ready[name] = tick

    def operands(self, launch: Launch, use: _Use) -> list[_Memory | None]:
        """Rules 0 to 2 for what the launch reads and writes."""
        blocks = [self.readable(name, launch) for name in launch.operands]
        for name, block in zip(launch.operands, blocks, strict=True):
            if block is None:
                continue
            version = self.shown.get(name, name)
            if block.newest != version:
                writer = block.writer.launch if block.writer else None
                self.breach(2, f"{use} takes {name}, which {block.newest} has replaced", writer, launch)
            producer = self.producer.get(version)
            if producer is None:
                self.input(version, launch, use)
            elif not producer.before(use):
                self.missing(1, f"{use} takes {name}, which {producer} produces", producer, use)
        for position, as_ in launch.op.written().items():
            block = blocks[position] if position < len(blocks) else None
            if block is None:
                continue
            name = launch.op.results[as_]
            for other, (also, taken) in enumerate(zip(launch.op.operands, blocks, strict=False)):
                if taken is block and other != position:
                    mine, theirs = launch.operands[position], launch.operands[other]
                    what = "it" if theirs == mine else f"{theirs}, in the same memory,"
                    self.breach(2, f"{use} writes {mine} as {name} and takes {what} as {also} too", None, launch)
            for reader in block.uses:
                if not reader.before(use):
                    self.missing(2, f"{use} writes {launch.operands[position]}, which {reader} uses", reader, use)
        for block in blocks:
            if block is not None:
                block.uses[use] = None
        return blocks

    def input(self, name: str, launch: Launch, use: _Use) -> None:
        """Rule 1 for an input: main must have it, and this stream must have seen main at that point."""
        if name not in self.inputs:
            return
        if name not in self.ready:
            self.breach(1, f"{use} takes input {name}, which nothing has staged; missing: stage {name}", None, launch)
        elif use.seen.get(MAIN, 0) < self.ready[name]:
            text = f"{use} takes input {name}, which is ready on {MAIN}; missing order: start of {MAIN} -> {use}"
            self.found.append(Violation(1, text, None, launch, order=True))

    def readable(self, name: str, effect: Effect) -> _Memory | None:
        block = self.memory.get(name)
        if block is None:
            self.breach(0, f"{name} is used by '{effect}' but nothing before it produces it", None, effect)
        elif block.dropped is not None:
            self.breach(3, f"{name} is used by '{effect}' after '{block.dropped}'", block.dropped, effect)
        return block

    def shared(self, launch: Launch, use: _Use) -> None:
        """Rules 2 and 6: a workspace has one user at a time, and a rank one collective at a time."""
        for name in launch.op.uses:
            previous = self.workspaces.get(name)
            if previous is not None and not previous.before(use):
                self.missing(2, f"{previous} and {use} share workspace {name!r}", previous, use)
            self.workspaces[name] = use
        if launch.op.communicates:
            self.collective(launch, use)

    def collective(self, launch: Launch, use: _Use) -> None:
        group = launch.op.group_of()
        lane = group.name if group is not None and group.independent else None
        previous = self.collectives.get(lane)
        if previous is not None and not previous.before(use):
            text = f"{previous} and {use} are collectives, which all ranks must run in one order"
            self.missing(6, text, previous, use)
        self.collectives[lane] = use
        first = self.groups.setdefault(group.name, launch) if group is not None else launch
        if first.op.group_of() != group:
            text = f"'{launch}' and '{first}' must say the same of their group: got {group} and {first.op.group_of()}"
            self.breach(0, text, first, launch)

    def reuse(self, launch: Launch, use: _Use) -> None:
        """Rule 3: this launch may take any memory that its stream was given back since its last launch.

        Only the first launch behind a drop is asked: later ones on the stream have seen all that it has, and more.
        Uses on the home stream itself are in order.  A keeping stream covers what it had seen at the drop, since there
        the allocator records the event that it waits for; what the stream is given later does not count.
        """
        for block in self.free.pop(launch.stream, []):
            for reader in block.uses:
                stream = reader.launch.stream
                kept = any(seen.get(stream, 0) >= reader.tick for seen in block.covered)
                if stream != launch.stream and not kept and not reader.before(use):
                    text = (
                        f"{use} may take the memory of {block.name}, which {reader} uses and nothing keeps until it has"
                    )
                    self.missing(3, text, reader, use)

    def results(self, launch: Launch, use: _Use, blocks: list[_Memory | None]) -> None:
        written = launch.op.written()
        versions = {result: blocks[position] for position, result in written.items() if position < len(blocks)}
        views = {
            result: launch.operands[k] for result, k in launch.op.viewed().items() if k < len(blocks) and blocks[k]
        }
        for index, (name, aval) in enumerate(zip(launch.results, self.infer(launch), strict=True)):
            if name in self.avals:
                self.breach(0, f"{name} is produced twice, the second time by '{launch}'", None, launch)
            self.avals[name] = aval
            if index in views:
                self.shown[name] = self.shown.get(views[index], views[index])
                self.memory[name] = self.memory[views[index]]
                continue
            self.producer[name] = use
            block = versions.get(index) or _Memory(name, name, home=launch.stream, uses={use: None})
            if index in versions:
                block.newest, block.writer = name, use
            self.memory[name] = block

    def infer(self, launch: Launch) -> list[Aval | None]:
        operands = [self.avals.get(name) for name in launch.operands]
        unknown: list[Aval | None] = [None] * len(launch.results)
        known = [aval for aval in operands if aval is not None]
        if len(known) < len(operands):
            return unknown
        on_host = launch.op.on_host()
        for position, (name, given) in enumerate(zip(launch.op.operands, launch.operands, strict=False)):
            if (position in on_host) != (given in self.inputs and self.inputs[given].place == "host"):
                where = "on the host" if position in on_host else "on the device"
                self.breach(0, f"{name} of '{launch}' must be {where}: got {given}, which is not", None, launch)
        try:
            found = launch.op.infer(*known)
        except ShapeError as error:
            self.breach(0, str(error), None, launch)
            return unknown
        if len(found) != len(launch.results):
            self.breach(
                0, f"{launch.op.name} has {len(found)} results: '{launch}' names {len(launch.results)}", None, launch
            )
            return unknown
        return list(found)

    def record(self, record: Record) -> None:
        if record.event in self.events:
            self.breach(4, f"event {record.event} is recorded twice", self.events[record.event][0], record)
        self.tick(record.stream)
        self.events[record.event] = (record, dict(self.clock(record.stream)))

    def wait(self, wait: Wait) -> None:
        if wait.event not in self.events:
            text = (
                f"{wait.stream} waits for event {wait.event}, which is not recorded before; missing: record "
                f"{wait.event}"
            )
            self.breach(4, text, None, wait)
            return
        clock = self.clock(wait.stream)
        self.waiting[wait.stream] = (wait, self.tick(wait.stream))
        for stream, tick in self.events[wait.event][1].items():
            clock[stream] = max(clock.get(stream, 0), tick)
        self.waited.add(wait.event)

    def keep(self, keep: Keep) -> None:
        block = self.readable(keep.value, keep)
        if block is not None:
            block.kept[keep.stream] = keep

    def drop(self, drop: Drop) -> None:
        block = self.readable(drop.value, drop)
        if block is None or block.dropped:
            return
        if block.home is None:
            self.breach(3, f"input {block.name} belongs to the caller and may not be dropped", None, drop)
            return
        block.dropped = drop
        block.covered = [dict(self.clock(stream)) for stream in block.kept]
        self.free[block.home].append(block)

    def end(self) -> None:
        """Rules 4 and 5, and outputs."""
        for event, (record, _) in self.events.items():
            if event not in self.waited:
                self.breach(4, f"event {event} is recorded on {record.stream} and nobody waits for it", record)
        clock = self.clock(MAIN)
        for stream, use in self.last.items():
            if clock.get(stream, 0) < use.tick:
                self.missing(5, f"{stream} has not joined {MAIN} at the end", use, None)
        for stream, (wait, tick) in self.waiting.items():
            joined = clock.get(stream, 0) >= tick
            if not joined and (stream not in self.last or clock.get(stream, 0) >= self.last[stream].tick):
                self.breach(5, f"{stream} has not joined {MAIN} since '{wait}'; missing: record on {stream}", wait)
        for name in self.program.outputs:
            block = self.memory.get(name)
            if block is None:
                self.breach(0, f"output {name} is produced by nothing")
            elif block.dropped:
                self.breach(3, f"output {name} is dropped", block.dropped)
            elif block.newest != self.shown.get(name, name):
                self.breach(2, f"output {name} has been replaced by {block.newest}")
