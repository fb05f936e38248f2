"""From a step and a placement to a program: stream effects are derived here.

Decided here: issue order, events, lifetimes.  Not known here: what any op
means, or any backend.  The law itself is `check`, which shares no code.

Order.  Launches are issued in the order in which the step was written.  For
launches i before j in issue order, the law wants "i before j" when

    j reads what i produced;  i and j touch one state, one of them writing;
    i and j use one workspace;  i and j are collectives of one group,

and inputs are ready, outputs read, on the main stream.  What stream order
does not give, a wait gives; of the waits only the transitive reduction is
kept, so none can be left out and no order is added that nobody asked for.

Lifetimes.  Memory of v is let go at the first point of the issue order from
which its home stream cannot outrun any use of v:

    - no later launch on the home stream: after the last use;
    - else before the first later launch on the home stream that runs after all uses of v;
    - else (no such launch) after the last use, with a Keep for each stream
      whose use the next launch on the home stream may overtake.

Waiting for a launch that is ordered anyway costs nothing: up to there no
launch on the home stream may take the memory, kept or not.  So a Keep, which
makes the allocator record and poll an event, is left for memory that no
order protects.  `mode="conservative"` does what careful hand-written code
does: it lets go after the last use and keeps everything that crosses streams.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Literal

from attrs import define, field

from mla_fx.effects.op import Call, Value
from mla_fx.effects.program import MAIN, Drop, Effect, Input, Keep, Launch, Program, Record, Wait, memory_of
from mla_fx.effects.step import Step

#: An orchestration: from a call (its op, its operands) to the name of its stream.
Placement = Callable[[Call], str]
Mode = Literal["minimal", "conservative"]


class ScheduleError(ValueError):
    """A step that no issue order can make legal, or a placement that is no placement."""


def schedule(step: Step, placement: Placement, *, mode: Mode = "minimal") -> Program:
    """The program of `step` with each call on the stream that `placement` gives it.

    `mode` is "minimal" (fewest kept values) or "conservative" (every value
    that crosses streams is kept).  Raises `ScheduleError`.
    """
    if mode not in ("minimal", "conservative"):
        raise ScheduleError(f"mode must be 'minimal' or 'conservative': got {mode!r}")
    outputs, tree = step.results()
    inputs = step.inputs()
    calls = _issue_order(outputs)
    names = _names(inputs, calls, outputs)
    launches = [_launch(call, placement, names) for call in calls]
    plan = _Plan(launches, tuple(inputs), tuple(names[_key(value)] for value in outputs))
    plan.order()
    plan.lifetimes(conservative=mode == "conservative")
    return Program(
        inputs=tuple(Input(name, value.aval) for name, value in inputs.items()),
        outputs=plan.outputs,
        effects=tuple(plan.effects()),
        name=step.name,
        orchestration=title(placement),
        tree=tree,
    )


def title(placement: Placement) -> str:
    """What an orchestration is called in listings: `attention_aside` is attention-aside."""
    name: str = getattr(placement, "__name__", type(placement).__name__)
    return name.replace("_", "-")


def _launch(call: Call, placement: Placement, names: "_Names") -> Launch:
    stream = placement(call)
    if not isinstance(stream, str) or not stream.isidentifier():
        raise ScheduleError(f"a placement must give the name of a stream (an identifier): got {stream!r} for {call!r}")
    for value in call.operands:
        if _key(value) not in names:
            raise ScheduleError(f"{value.name}, an operand of {call!r}, is not among the arguments of the step")
    results = tuple(names[call, index] for index in range(len(call.op.results)))
    return Launch(stream, call.op, tuple(names[_key(value)] for value in call.operands), results)


# --- issue order and names ---------------------------------------------------

#: What identifies a value: its call and index, or the name of an input.
_Key = tuple[Call | None, int | str]
_Names = dict[_Key, str]


def _key(value: Value) -> _Key:
    return (value.call, value.index) if value.call else (None, value.name)


def _names(inputs: dict[str, Value], calls: list[Call], outputs: list[Value]) -> _Names:
    """A name for every value: that of its descriptor, with a number where it is taken."""
    hints = {_key(v): v.name for v in [*(v for call in calls for v in call.operands), *outputs]}
    names: _Names = {(None, value.name): name for name, value in inputs.items()}
    taken = set(inputs) | {name.split(".")[0].split("[")[0] for name in inputs}
    count: dict[str, int] = defaultdict(int)
    for call in calls:
        for index, default in enumerate(call.op.results):
            hint = name = hints.get((call, index), default)
            while name in taken:
                count[hint] += 1
                name = f"{hint}_{count[hint]}"
            taken.add(name)
            names[call, index] = name
    return names


def _reachable(outputs: Iterable[Value]) -> list[Call]:
    found: dict[Call, None] = {}
    stack = [value.call for value in outputs if value.call]
    while stack:
        call = stack.pop()
        if call not in found:
            found[call] = None
            stack.extend(value.call for value in call.operands if value.call)
    return sorted(found, key=lambda call: call.serial)


def _issue_order(outputs: list[Value]) -> list[Call]:
    """Order of writing, except that a state's readers come before the launch that replaces that version."""
    calls = _reachable(outputs)
    after: dict[Call, set[Call]] = {call: {v.call for v in call.operands if v.call} for call in calls}
    readers: dict[_Key, list[Call]] = defaultdict(list)
    writers: dict[_Key, Call] = {}
    for call in calls:
        for position, value in enumerate(call.operands):
            version = _key(value)
            if position not in call.op.writes:
                readers[version].append(call)
            elif version in writers:
                raise ScheduleError(
                    f"{value.name} is a state, and a version of a state is written once: "
                    f"got {writers[version]!r} and {call!r}; the second must write what the first returns"
                )
            else:
                writers[version] = call
    for version, writer in writers.items():
        after[writer] |= {reader for reader in readers[version] if reader is not writer}
    for value in outputs:
        if (replacing := writers.get(_key(value))) is not None:
            raise ScheduleError(f"output {value.name} is a version of a state that {replacing!r} replaces")
    return _topological(after)


def _topological(after: dict[Call, set[Call]]) -> list[Call]:
    """The calls, each after all in its set, otherwise in the order in which they were written."""
    before: dict[Call, list[Call]] = defaultdict(list)
    missing = {call: len(needs) for call, needs in after.items()}
    for call, needs in after.items():
        for need in needs:
            before[need].append(call)
    ready = [(call.serial, call) for call, count in missing.items() if not count]
    heapq.heapify(ready)
    order: list[Call] = []
    while ready:
        _, call = heapq.heappop(ready)
        order.append(call)
        for later in before[call]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (later.serial, later))
    if len(order) < len(after):
        stuck = [call for call in after if missing[call]]
        raise ScheduleError(
            f"{stuck[0]!r} and {stuck[-1]!r} each need the other first: "
            "an old version of a state is read after it was replaced"
        )
    return order


# --- effects -----------------------------------------------------------------


class _Needs(dict[int, str]):
    """Launches that must run first, each with the reasons, as a reader of the listing wants them."""

    def add(self, launch: int, why: str) -> None:
        reasons = self.get(launch, why).split(", ")
        self[launch] = ", ".join(reasons if why in reasons else [*reasons, why])


@define
class _Plan:
    """Launches in issue order, and what is derived to stand before and behind each of them."""

    launches: list[Launch]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    waits: dict[int, list[tuple[int, str]]] = field(factory=lambda: defaultdict(list))  # launch -> (event source, why)
    drops: dict[int, list[Effect]] = field(factory=lambda: defaultdict(list))  # behind this launch
    drops_before: dict[int, list[Effect]] = field(factory=lambda: defaultdict(list))  # between its waits and it
    keeps: dict[int, list[Effect]] = field(factory=lambda: defaultdict(list))  # before this launch
    #: ordered[j]: bit i is set when launch i runs before launch j.  Bit 0 is the start, launch i is bit i + 1.
    ordered: list[int] = field(factory=list)

    def order(self) -> None:
        """Derive the waits; fill `ordered`."""
        last = {MAIN: 1}  # stream -> bits ordered before its next launch
        needs = self._needs()
        for j, launch in enumerate([*self.launches, None]):
            stream = launch.stream if launch else MAIN
            have = last.get(stream, 0)
            # Later launches first: what they bring along need not be waited for again.
            for i, why in sorted(needs[j].items(), reverse=True):
                if not have >> (i + 1) & 1:
                    self.waits[j].append((i, why))
                    have |= (1 << (i + 1)) | (self.ordered[i] if i >= 0 else 0)
            self.ordered.append(have)
            last[stream] = have | (1 << (j + 1))

    def _needs(self) -> list["_Needs"]:
        """For each launch, and for the end, the launches that must run before it, each with the reasons."""
        producer = dict.fromkeys(self.inputs, -1)
        root = memory_of(self.inputs, self.launches)
        users: dict[str, list[int]] = defaultdict(list)  # of a state, since it was written
        writer: dict[str, int] = {}
        shared: dict[str, int] = {}  # workspace or group -> its last user
        found: list[_Needs] = []
        for j, launch in enumerate(self.launches):
            need = _Needs()
            for position, name in enumerate(launch.operands):
                need.add(producer[name], name)
                if root[name] in writer:
                    need.add(writer[root[name]], name)
                for i in users[root[name]] if position in launch.op.writes else ():
                    need.add(i, name)
            for name in filter(None, (*launch.op.uses, launch.op.communicates)):
                if name in shared:
                    need.add(shared[name], name)
                shared[name] = j
            producer.update(dict.fromkeys(launch.results, j))
            for result in launch.op.writes.values():
                memory = root[launch.results[result]]
                writer[memory], users[memory] = j, []
            for name in launch.operands:
                users[root[name]].append(j)
            found.append(need)
        end = _Needs()
        for name in self.outputs:  # every launch is there for an output, so with them all streams have joined
            end.add(producer[name], name)
        return [*found, end]

    def lifetimes(self, *, conservative: bool) -> None:
        """Derive the drops and the keeps."""
        root = memory_of(self.inputs, self.launches)
        held = {root[name] for name in self.outputs}
        touched: dict[str, list[int]] = defaultdict(list)  # memory -> launches that use it, its allocation first
        for j, launch in enumerate(self.launches):
            for memory in dict.fromkeys(root[name] for name in (*launch.operands, *launch.results)):
                touched[memory].append(j)
        for memory in [memory for memory in touched if memory not in self.inputs]:
            uses = touched[memory]
            away = [j for j in uses if self.launches[j].stream != self.launches[uses[0]].stream]
            if conservative:
                for stream, j in {self.launches[j].stream: j for j in reversed(away)}.items():
                    self.keeps[j].append(Keep(memory, stream))
            if memory not in held:
                self._drop(memory, uses, [] if conservative else away)

    def _drop(self, memory: str, uses: list[int], away: list[int]) -> None:
        home, last = self.launches[uses[0]].stream, max(uses)
        later = [j for j in range(last + 1, len(self.launches)) if self.launches[j].stream == home]
        if not later or not away:
            self.drops[last].append(Drop(memory))
            return
        bits = sum(1 << (j + 1) for j in set(away))
        covered = next((j for j in later if self.ordered[j] & bits == bits), None)
        if covered is not None:
            self.drops_before[covered].append(Drop(memory))
            return
        open_ = [self.launches[j].stream for j in away if not self.ordered[later[0]] >> (j + 1) & 1]
        self.drops[last] += [*(Keep(memory, stream) for stream in dict.fromkeys(open_)), Drop(memory)]

    def effects(self) -> Iterable[Effect]:
        """All effects, in issue order."""
        sources = sorted({i for waits in self.waits.values() for i, _ in waits})
        events = {i: f"e{number}" for number, i in enumerate(sources)}
        if -1 in events:
            yield Record(MAIN, events[-1])
        for j, launch in enumerate(self.launches):
            for i, why in self.waits.get(j, []):
                yield Wait(launch.stream, events[i], why)
            yield from self.keeps.get(j, [])
            yield from self.drops_before.get(j, [])
            yield launch
            if j in events:
                yield Record(launch.stream, events[j])
            yield from self.drops.get(j, [])
        for i, why in self.waits.get(len(self.launches), []):
            yield Wait(MAIN, events[i], why)
