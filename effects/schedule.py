"""From a step and an orchestration to a program: stream effects are derived here.

Decided here: issue order, events, lifetimes.  Not known here: what any op
means, or any backend.  The law itself is `check`, which shares no code.

Order.  Equations are issued in the order that the orchestration gives them (as
they were written, where it gives none).  For launches i before j in issue
order, the law wants "i before j" when

    j reads what i produced;  i and j touch one state, one of them writing;
    i and j use one workspace;  i and j are collectives, of one group or of groups that are not independent,

and inputs are ready, outputs read, on the main stream.  A view is the memory
and the content of what it is a view of: whoever takes it takes that.  What stream order does
not give, a wait gives; of the waits only the transitive reduction is kept, so
none can be left out and no order is added that nobody asked for.

Lifetimes.  Memory of v is let go at the first point of the issue order from
which its home stream cannot outrun any use of v:

    - no later launch on the home stream: after the last use;
    - else before the first later launch on the home stream that runs after all uses of v;
    - else (no such launch) after the last use, kept for the fewest streams that together have seen every use
      that the next launch on the home stream may overtake.

A Keep makes the allocator record an event at the drop and poll it at later
allocations; until it is seen the memory is nobody's, and when that is, is luck.
An order that is there anyway costs nothing and holds in every run, so a Keep is
left for memory that no order gives back while the program lasts.  This is
`mode="minimal"`, for launches in this order on these streams with these waits:
a value is given back by the first order that does, if one does; otherwise it is
let go right after its last use, and kept for as few streams as that allows.
`mode="conservative"` does what careful hand-written code does: it lets go after
the last use and keeps everything that crosses streams.

The end of a program needs no keeping.  All streams have joined main by then,
and whatever is launched next on any of them belongs to a program too, whose
every launch follows the start of main: behind all uses here, and behind what
the caller did with the outputs on main before letting go of them.
"""

import heapq
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final, Literal

from attrs import define, field, frozen

from mla_fx.effects.orchestration import Orchestration, orchestration
from mla_fx.effects.program import MAIN, Drop, Effect, Keep, Launch, Program, Record, Stage, Wait
from mla_fx.effects.step import Equation, Input, Step, StepError, memory_of, versions_of

Mode = Literal["minimal", "conservative"]


class ScheduleError(ValueError):
    """A step that no issue order can make legal, or an orchestration that does not fit it."""


def schedule(step: Step, given: Orchestration | Callable[[Equation], str], *, mode: Mode = "minimal") -> Program:
    """The program of `step` under an orchestration, or under a function from equation to stream.

    `mode` is "minimal" (fewest kept values) or "conservative" (every value
    that crosses streams is kept).  Raises `ScheduleError`.
    """
    if mode not in ("minimal", "conservative"):
        raise ScheduleError(f"mode must be 'minimal' or 'conservative': got {mode!r}")
    chosen = orchestration(given)
    for one in chosen.passes:
        step = one(step)
    launches = [_launch(equation, chosen) for equation in _issue_order(step, _permuted(step, chosen))]
    used = {launch.stream for launch in launches}
    if idle := [stream for stream in chosen.streams if stream not in used]:
        raise ScheduleError(
            f"orchestration {chosen.name}: each of its streams must be given an equation of {step.name}: "
            f"got none on {', '.join(idle)}"
        )
    plan = _Plan(launches, step.inputs, step.outputs)
    plan.order()
    plan.lifetimes(conservative=mode == "conservative")
    return Program(step.inputs, step.outputs, tuple(plan.effects()), step.name, chosen.name, step.tree)


def _permuted(step: Step, chosen: Orchestration) -> tuple[Equation, ...]:
    """The equations in the order that the orchestration asks for."""
    try:
        ordered = chosen.order(step)
    except StepError as error:
        raise ScheduleError(f"orchestration {chosen.name}: its order must leave {step.name} a step: {error}") from error
    if ordered is step:
        return step.equations
    # Equations without results may be there twice.
    permuted = isinstance(ordered, Step) and Counter(ordered.equations) == Counter(step.equations)
    if not permuted or _around(ordered) != _around(step):
        raise ScheduleError(f"orchestration {chosen.name}: its order must permute the equations of {step.name} only")
    return ordered.equations


def _around(step: Step) -> tuple[object, ...]:
    """All of a step but its equations."""
    return step.name, step.inputs, step.outputs, step.tree


def _launch(equation: Equation, chosen: Orchestration) -> Launch:
    stream = chosen.stream(equation)
    if not isinstance(stream, str) or not stream.isidentifier():
        raise ScheduleError(
            f"orchestration {chosen.name}: must give the name of a stream (an identifier): got {stream!r} "
            f"for '{equation}'"
        )
    return Launch(stream, equation.op, equation.operands, equation.results, equation.tag)


# --- issue order -------------------------------------------------------------


def _issue_order(step: Step, equations: Sequence[Equation]) -> list[Equation]:
    """The order given, except that operands come first, and a state's readers before what replaces their version."""
    inputs = [put.name for put in step.inputs]
    shown, root = versions_of(inputs, step.equations), memory_of(inputs, step.equations)
    producer = {name: index for index, equation in enumerate(equations) for name in equation.results}
    after = [{producer[name] for name in e.operands if name in producer} for e in equations]
    readers: dict[str, list[int]] = defaultdict(list)
    writers: dict[str, int] = {}
    for index, equation in enumerate(equations):
        written = equation.op.written()
        memory = [root[name] for name in equation.operands]
        for position, name in enumerate(equation.operands):
            version = shown[name]
            if position not in written:
                readers[version].append(index)
            elif memory.count(memory[position]) > 1:
                both = " and ".join(n for n in dict.fromkeys(equation.operands) if root[n] == memory[position])
                raise ScheduleError(f"{both}: a state must be one operand of what writes it: got '{equation}'")
            elif version in writers:
                raise ScheduleError(
                    f"{version} is a state, and a version of a state is written once: got "
                    f"'{equations[writers[version]]}' and '{equation}'; the second must write what the first returns"
                )
            else:
                writers[version] = index
    for version, writer in writers.items():
        after[writer] |= {reader for reader in readers[version] if reader != writer}
    for name in step.outputs:
        if shown[name] in writers:
            raise ScheduleError(
                f"output {name} is a version of a state that '{equations[writers[shown[name]]]}' replaces"
            )
    return [equations[index] for index in _topological(after, equations)]


def _topological(after: list[set[int]], equations: Sequence[Equation]) -> list[int]:
    """Indices, each after all in its set, otherwise in order."""
    before: list[list[int]] = [[] for _ in after]
    missing = [len(needs) for needs in after]
    for index, needs in enumerate(after):
        for need in needs:
            before[need].append(index)
    ready = [index for index, count in enumerate(missing) if not count]  # ascending, so a heap already
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for later in before[index]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, later)
    if len(order) < len(after):
        stuck = [equations[index] for index, count in enumerate(missing) if count]
        raise ScheduleError(
            f"'{stuck[0]}' and '{stuck[-1]}' each need the other first: "
            "an old version of a state is read after it was replaced"
        )
    return order


# --- effects -----------------------------------------------------------------

#: The point of the main stream from which inputs are ready, behind the staging.
_START: Final = -1
_NONE: Final = -2


@frozen(eq=False)
class _Before:
    """Which launches run before a point: of every stream all up to one, since a stream runs in issue order."""

    streams: Sequence[str]  # of every launch
    last: Mapping[str, int]  # stream -> the last launch there that runs before the point; on main there is the start

    def has(self, launch: int) -> bool:
        stream = MAIN if launch == _START else self.streams[launch]
        return self.last.get(stream, _NONE) >= launch

    def has_all(self, launches: Iterable[int]) -> bool:
        return all(map(self.has, launches))

    def joined(self, other: "_Before | None", launch: int) -> "_Before":
        """With all that runs before a launch (`other`), and the launch."""
        last = dict(self.last)
        for stream, i in other.last.items() if other else ():
            if last.get(stream, _NONE) < i:
                last[stream] = i
        stream = MAIN if launch == _START else self.streams[launch]
        last[stream] = max(launch, last.get(stream, _NONE))
        return _Before(self.streams, last)


@define
class _Plan:
    """Launches in issue order, and what is derived to stand before and behind each of them."""

    launches: list[Launch]
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    waits: dict[int, list[tuple[int, list[str]]]] = field(factory=lambda: defaultdict(list))  # launch -> (source, why)
    drops: dict[int, list[Effect]] = field(factory=lambda: defaultdict(list))  # behind this launch
    drops_before: dict[int, list[Effect]] = field(factory=lambda: defaultdict(list))  # between its waits and it
    keeps: dict[int, list[Effect]] = field(factory=lambda: defaultdict(list))  # before this launch
    before: list[_Before] = field(factory=list)  # what runs before each launch
    on: dict[str, list[int]] = field(factory=lambda: defaultdict(list))  # stream -> its launches
    root: Mapping[str, str] = field(init=False)  # value -> the value in whose memory it lies
    shown: Mapping[str, str] = field(init=False)  # value -> the value whose content it shows

    def __attrs_post_init__(self) -> None:
        inputs = [put.name for put in self.inputs]
        self.root, self.shown = memory_of(inputs, self.launches), versions_of(inputs, self.launches)
        for j, launch in enumerate(self.launches):
            self.on[launch.stream].append(j)

    def order(self) -> None:
        """Derive the waits; fill `before`."""
        streams = [launch.stream for launch in self.launches]
        nothing = _Before(streams, {})
        seen = {MAIN: _Before(streams, {MAIN: _START})}  # stream -> what runs before its next launch
        for j, needs in enumerate(self._needs()):
            stream = self.launches[j].stream if j < len(self.launches) else MAIN
            have = seen.get(stream, nothing)
            # Later launches first: what they bring along need not be waited for again.  An earlier one never brings a
            # later one along, so each wait that is made is needed, and no other choice has fewer.
            for i in sorted(needs, reverse=True):
                if not have.has(i):
                    self.waits[j].append((i, needs[i]))
                    have = have.joined(self.before[i] if i != _START else None, i)
            self.before.append(have)
            if j < len(streams):
                seen[stream] = have.joined(None, j)

    def _needs(self) -> Iterable[dict[int, list[str]]]:
        """For each launch, and for the end, the launches that must run before it, each with what for."""
        producer = {put.name: _START for put in self.inputs}
        root, shown = self.root, self.shown
        users: dict[str, list[int]] = defaultdict(list)  # of a state, since it was written
        writer: dict[str, int] = {}
        workspace: dict[str, int] = {}  # its last user
        collective: dict[str | None, int] = {}  # independent group, or None for all others -> the last one
        for j, launch in enumerate(self.launches):
            need: dict[int, list[str]] = defaultdict(list)
            written = launch.op.written()
            for position, name in enumerate(launch.operands):
                sources = [producer[shown[name]]]
                sources += [writer[root[name]]] if root[name] in writer else []
                sources += users[root[name]] if position in written else []
                for i in sources:
                    need[i].append(name)
            for name in launch.op.uses:
                if name in workspace:
                    need[workspace[name]].append(name)
                workspace[name] = j
            if launch.op.communicates:
                group = launch.op.group_of()
                lane = group.name if group is not None and group.independent else None
                if lane in collective:
                    need[collective[lane]].append("collectives")
                collective[lane] = j
            producer.update(dict.fromkeys(launch.results, j))
            for result in written.values():
                memory = root[launch.results[result]]
                writer[memory], users[memory] = j, []
            for name in launch.operands:
                users[root[name]].append(j)
            yield need
        end: dict[int, list[str]] = defaultdict(list)
        for name in self.outputs:
            end[producer[shown[name]]].append(name)
        for mine in self.on.values():  # an equation that no output needs is issued, and joins, like all others
            if mine[-1] not in end:
                end[mine[-1]].append("end")
        yield end

    def lifetimes(self, *, conservative: bool) -> None:
        """Derive the drops and the keeps."""
        names, root = {put.name for put in self.inputs}, self.root
        held = {root[name] for name in self.outputs}
        touched: dict[str, list[int]] = defaultdict(list)  # memory -> launches that use it, its allocation first
        for j, launch in enumerate(self.launches):
            for memory in dict.fromkeys(root[name] for name in (*launch.operands, *launch.results)):
                touched[memory].append(j)
        for memory, uses in touched.items():
            if memory in names:
                continue  # the caller's
            home = self.launches[uses[0]].stream
            away = [j for j in uses if self.launches[j].stream != home]
            if conservative:
                for stream, j in {self.launches[j].stream: j for j in reversed(away)}.items():
                    self.keeps[j].append(Keep(memory, stream))
            if memory not in held:
                self._drop(memory, uses[-1], home, [] if conservative else away)

    def _drop(self, memory: str, last: int, home: str, away: list[int]) -> None:
        """Let go of memory that launches up to `last` use, those in `away` on other streams than its home."""
        mine = self.on[home]
        later = mine[bisect_right(mine, last) :] if away else []
        if not later:
            # Nobody can take the memory in this program, or all uses are on its own stream.
            self.drops[last].append(Drop(memory))
            return
        # The home stream's launches see more and more, so the first that has seen all is found by halving.
        covered = _first(later, lambda j: self.before[j].has_all(away))
        if covered is not None:
            self.drops_before[covered].append(Drop(memory))
            return
        # The very next launch on the home stream may take the memory: what it has not seen must be kept for somebody.
        racing = [j for j in away if not self.before[later[0]].has(j)]
        self.drops[last] += [*(Keep(memory, stream) for stream in self._cover(racing, last)), Drop(memory)]

    def _cover(self, racing: list[int], last: int) -> tuple[str, ...]:
        """The fewest streams that, behind launch `last`, together have seen all the launches that race."""
        seen: dict[str, _Before] = {}
        for stream, mine in self.on.items():
            if at := bisect_right(mine, last):
                seen[stream] = self.before[mine[at - 1]].joined(None, mine[at - 1])
        candidates = list(dict.fromkeys(self.launches[j].stream for j in racing))  # each of them sees its own
        for count in range(1, len(candidates)):
            for some in combinations(seen, count):
                if all(any(seen[stream].has(j) for stream in some) for j in racing):
                    return some
        return tuple(candidates)

    def effects(self) -> Iterable[Effect]:
        """All effects, in issue order."""
        sources = sorted({i for waits in self.waits.values() for i, _ in waits})
        events = {i: f"e{number}" for number, i in enumerate(sources)}
        if staged := tuple(put.name for put in self.inputs if put.place == "staged"):
            yield Stage(staged)
        if _START in events:
            yield Record(MAIN, events[_START])
        for j, launch in enumerate(self.launches):
            for i, why in self.waits.get(j, []):
                yield Wait(launch.stream, events[i], ", ".join(dict.fromkeys(why)))
            yield from self.keeps.get(j, [])
            yield from self.drops_before.get(j, [])
            yield launch
            if j in events:
                yield Record(launch.stream, events[j])
            yield from self.drops.get(j, [])
        for i, why in self.waits.get(len(self.launches), []):
            yield Wait(MAIN, events[i], ", ".join(dict.fromkeys(why)))


def _first(sorted_: list[int], holds: Callable[[int], bool]) -> int | None:
    """The first for which `holds`, which from there on holds for all."""
    low, high = 0, len(sorted_)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(sorted_[middle]) else (middle + 1, high)
    return sorted_[low] if low < len(sorted_) else None
