"""The hostile machine: a program run late and out of order, by a seed.

It does whatever the law of a program allows a device to do, and nothing else
is promised to a program:

    Every rank has a host that issues effects in order, and a queue per stream.  Which host or queue
    moves next is drawn at random; a queue only obeys its own order and the events it waits for.
    An op begins and ends in two moves, and others may move in between.  It reads at its end.
    Memory is NaN when it is allocated and again when the op that owns it begins.
    Dropped memory is handed to the very next launch on its home stream (any launch: operators allocate
    scratch too), which ruins it as it begins; kept memory only once the keeping streams got there.
    A state is NaN while an op writes it, all of its memory where what is written is a view.  A workspace that somebody
    else touched between an op's begin and end makes its results NaN.
    Inputs arrive on the main stream, staged ones when they are sent; outputs are read there, whatever other
    streams still do.
    A collective pairs the n-th of each rank of its group, whichever op and group that is; a wrong pair is NaN.  Those
    of a group that is declared independent are counted apart.
    Waiting for an event that has not been recorded does nothing.

Half of the seeds draw uniformly; the others give priorities and change them at
one to three points, which finds a race of small depth with a known probability
(PCT: Burckhardt et al., ASPLOS 2010).
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen

from mla_fx.backends.body import collective_of, forming_rule
from mla_fx.backends.contract import ContractError, check_results
from mla_fx.backends.prepared import Prepared
from mla_fx.backends.rows import RunError
from mla_fx.backends.table import Rule
from mla_fx.dtypes import DTYPES
from mla_fx.effects import MAIN, Aval, Drop, Effect, Keep, Launch, Program, Record, Stage, Wait

if TYPE_CHECKING:
    from mla_fx.backends.backend import Backend

_Actor = tuple[int, str]  # rank, and a stream or the host
_HOST = "<host>"


@define(eq=False)
class _Mark:
    """A point in a queue: an event, or where a keeping stream was at a drop."""

    passed: bool = False

    def passes(self) -> None:
        self.passed = True


@define(eq=False)
class _Task:
    """A launch on one rank."""

    index: int  # of the launch in the program
    launch: Launch
    rank: int
    operands: tuple[Any, ...]
    results: tuple[torch.Tensor, ...]
    ruined: list[torch.Tensor]  # dropped memory that this launch takes
    states: tuple[torch.Tensor, ...]  # the memory that it writes in place
    saved: tuple[torch.Tensor, ...] = ()  # what these held
    spoiled: bool = False
    exchanged: list[tuple[torch.Tensor, ...]] | None = None  # what a collective gave this rank; empty: garbage


@frozen(eq=False)
class _Move:
    """An entry of a queue: what to do, and when it may be done (None: at any time)."""

    act: Callable[[], None]
    ready: Callable[[], bool] | None = None


@define(eq=False)
class _Rank:
    """One rank: its queues and its memory.  The host is a queue too, of the effects it has yet to issue."""

    queues: dict[str, deque[_Move]]
    values: dict[str, Any] = field(factory=dict)
    events: dict[str, _Mark] = field(factory=dict)
    kept: dict[str, set[str]] = field(factory=lambda: defaultdict(set))
    free: dict[str, list[torch.Tensor]] = field(factory=lambda: defaultdict(list))
    pending: list[tuple[list[_Mark], str, torch.Tensor]] = field(factory=list)
    scratch: dict[str, object] = field(factory=dict)
    read: dict[str, torch.Tensor] = field(factory=dict)
    sent: dict[str, torch.Tensor] = field(factory=dict)  # what arrives in the inputs


class Adversary:
    """The body of an adversarial executable: leaves of the inputs to those of the outputs, rank after rank."""

    def __init__(
        self, program: Program, backend: "Backend", prepared: Prepared | None, *, seed: int, legal: bool
    ) -> None:
        self.program, self.seed, self.legal, self.ranks = program, seed, legal, backend.ranks
        self.layout = backend.layout
        self.avals, self.root, self.home = program.avals(), program.memory(), program.home()
        self.prepared = prepared
        self.rules: list[list[Rule]] = [self._rules(launch, backend) for launch in program.launches]
        number = iter(range(len(program.launches)))
        self.index = [next(number) if isinstance(effect, Launch) else -1 for effect in program.effects]
        self.states = program.states()

    @cached_property
    def views(self) -> list[dict[str, slice]]:
        """For every rank and view, the bytes of its memory that it is, as the rules say; raises `RunError`."""
        found: list[dict[str, slice]] = [{} for _ in range(self.ranks)]
        for launch, rules in zip(self.program.launches, self.rules, strict=True):
            for rank, places in enumerate(found):
                if launch.op.viewed():
                    places.update(self._views_of(launch, rules[rank], rank, places))
                for position, result in launch.op.written().items():
                    if launch.operands[position] in places:
                        places[launch.results[result]] = places[launch.operands[position]]
        return found

    def _views_of(self, launch: Launch, rule: Rule, rank: int, known: Mapping[str, slice]) -> dict[str, slice]:
        """The bytes of the views that a launch gives, asked of its rule by zeros: what is there decides nothing."""
        operands = [
            _zeros(self.avals[name], on_host=k in launch.op.on_host()) for k, name in enumerate(launch.operands)
        ]
        try:
            results = rule(*operands)
            check_results(launch, operands, results, [self.avals[name] for name in launch.results])
        except Exception as error:
            raise RunError(launch, rank, error) from error
        found = {}
        for result, position in launch.op.viewed().items():
            outer = known.get(launch.operands[position], slice(0, 0)).start
            start = outer + results[result].data_ptr() - operands[position].data_ptr()
            found[launch.results[result]] = slice(start, start + results[result].nbytes)
        return found

    def view(self, name: str, rank: int, memory: torch.Tensor) -> torch.Tensor:
        """A value in the memory that it lies in: all of it, or a view."""
        place, aval = self.views[rank].get(name), self.avals[name]
        if place is None:
            return memory
        if place.start == place.stop:
            return memory.new_empty(aval.shape, dtype=DTYPES[aval.dtype])
        return memory.view(-1).view(torch.uint8)[place].view(DTYPES[aval.dtype]).view(aval.shape)

    def _rules(self, launch: Launch, backend: "Backend") -> list[Rule]:
        """The rule of every rank; of a collective, one for all ranks of a group."""
        if launch.op.communicates:
            groups = dict.fromkeys(self.partners(launch, rank) for rank in backend.here)
            made = {ranks: collective_of(backend, launch.op, ranks) for ranks in groups}
            return [made[self.partners(launch, rank)] for rank in backend.here]
        avals = [self.avals[name] for name in launch.operands]
        return [forming_rule(backend, launch.op, avals, rank) for rank in backend.here]

    def partners(self, launch: Launch, rank: int) -> tuple[int, ...]:
        """The ranks of the group that a collective of `rank` runs over."""
        group = launch.op.group_of()
        assert group is not None
        return self.layout.members(group.name, rank)

    def __call__(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """One run; with the same seed and inputs, the same moves."""
        run = _Run(self, random.Random(self.seed))
        given, loaded = {}, iter(leaves)
        for put in self.program.inputs:
            of_ranks = iter(self.prepared.of(put)) if put.role == "parameter" and self.prepared else loaded
            given.update({(put.name, rank): next(of_ranks) for rank in range(self.ranks)})
        run.start(given)
        run.drive()
        if self.legal and run.error is not None:
            raise run.error
        for name in self.states:
            for rank in range(self.ranks):
                given[name, rank].copy_(run.state[rank].read[name])
        return tuple(
            self.view(name, rank, given[self.root[name], rank])
            if self.root[name] in self.states
            else run.state[rank].read[name]
            for name in self.program.outputs
            for rank in range(self.ranks)
        )


class _Run:
    """One execution."""

    def __init__(self, machine: Adversary, draw: random.Random) -> None:
        self.machine, self.draw = machine, draw
        names = (_HOST, *machine.program.streams)
        self.state = [_Rank({name: deque() for name in names}) for _ in range(machine.ranks)]
        # Collectives in the order of each rank, those of each independent group apart.
        self.entered: list[dict[str, list[_Task]]] = [defaultdict(list) for _ in self.state]
        self.error: Exception | None = None

    # --- who moves next ----------------------------------------------------

    def drive(self) -> None:
        """Let hosts and queues move until nothing is left."""
        queues = {(rank, name): queue for rank, state in enumerate(self.state) for name, queue in state.queues.items()}
        choose = self.draw.choice if self.draw.random() < 0.5 else self.by_priority([*queues])
        # One look at the head of every queue for every move: nearly all the time that a run takes goes here.
        while ready := [one for one, queue in queues.items() if queue and (not queue[0].ready or queue[0].ready())]:
            queues[choose(ready)].popleft().act()
        left = sum(map(len, queues.values()))
        assert left == 0, f"{left} moves can never run"

    def by_priority(self, actors: list[_Actor]) -> Callable[[Sequence[_Actor]], _Actor]:
        order = {actor: self.draw.random() for actor in actors}
        steps = 3 * len(self.machine.program.effects) * len(self.state)
        changes = {self.draw.randrange(steps) for _ in range(self.draw.randint(1, 3))}
        count = iter(range(10**9))

        def choose(ready: Sequence[_Actor]) -> _Actor:
            first = max(ready, key=order.__getitem__)
            if next(count) in changes:
                order[first] = -self.draw.random()
            return first

        return choose

    # --- the host ----------------------------------------------------------

    def start(self, given: dict[tuple[str, int], Any]) -> None:
        """Working copies of the inputs are NaN until they arrive on the main stream; the host has all yet to issue."""
        for rank, state in enumerate(self.state):
            arriving: list[str] = []
            for put in self.machine.program.inputs:
                leaf = given[put.name, rank]
                if isinstance(leaf, torch.Tensor):
                    state.values[put.name] = _poisoned(put.aval)
                    state.sent[put.name] = leaf
                    if put.place != "staged":
                        arriving.append(put.name)
                else:
                    state.values[put.name] = leaf
            state.queues[MAIN].append(_Move(partial(self.arrive, state, arriving)))
            effects = zip(self.machine.index, self.machine.program.effects, strict=True)
            state.queues[_HOST].extend(_Move(partial(self.issue, rank, state, *one)) for one in effects)
            state.queues[_HOST].append(_Move(partial(self.finish, state)))

    def arrive(self, state: _Rank, names: Sequence[str]) -> None:
        for name in names:
            state.values[name].copy_(state.sent[name])

    def finish(self, state: _Rank) -> None:
        """The host has issued all effects: outputs are read on the main stream, behind what it has been given."""
        state.queues[MAIN].append(_Move(partial(self.read, state)))

    def issue(self, rank: int, state: _Rank, index: int, effect: Effect) -> None:
        """The host of a rank issues an effect; `index` numbers launches."""
        match effect:
            case Launch():
                self.launch(rank, state, effect, index)
            case Stage():
                state.queues[MAIN].append(_Move(partial(self.arrive, state, effect.values)))
            case Record():
                mark = state.events[effect.event] = _Mark()
                state.queues[effect.stream].append(_Move(mark.passes))
            case Wait():
                event = state.events.get(effect.event, _Mark(passed=True))
                state.queues[effect.stream].append(_Move(_nothing, lambda: event.passed))
            case Keep():
                state.kept[self.machine.root[effect.value]].add(effect.stream)
            case Drop():
                self.drop(state, self.machine.root[effect.value])

    def launch(self, rank: int, state: _Rank, launch: Launch, index: int) -> None:
        operands = tuple(state.values[name] for name in launch.operands)
        machine = self.machine
        results = tuple(
            machine.view(name, rank, state.values[machine.root[name]])
            if machine.root[name] != name
            else _poisoned(machine.avals[name])
            for name in launch.results
        )
        state.values.update(zip(launch.results, results, strict=True))
        ruined = state.free.pop(launch.stream, [])
        for entry in [e for e in state.pending if e[1] == launch.stream and all(mark.passed for mark in e[0])]:
            state.pending.remove(entry)
            ruined.append(entry[2])
        states = tuple(state.values[machine.root[launch.operands[position]]] for position in launch.op.written())
        task = _Task(index, launch, rank, operands, results, ruined, states)
        queue = state.queues[launch.stream]
        queue.append(_Move(partial(self.begin, task)))
        queue.append(_Move(partial(self.end, task), partial(self.met, task) if launch.op.communicates else None))

    def drop(self, state: _Rank, memory: str) -> None:
        tensor, home = state.values[memory], self.machine.home.get(memory)
        if home is None:
            return  # an input: the caller still has it
        marks = []
        for stream in sorted(state.kept.pop(memory, ())):
            marks.append(mark := _Mark())
            state.queues[stream].append(_Move(mark.passes))
        if marks:
            state.pending.append((marks, home, tensor))
        else:
            state.free[home].append(tensor)

    def read(self, state: _Rank) -> None:
        """On the main stream, after all that was issued to it: what the caller gets."""
        for name in (*self.machine.program.outputs, *self.machine.states):
            state.read[name] = state.values[name].clone()

    # --- the device --------------------------------------------------------

    def begin(self, task: _Task) -> None:
        launch, state = task.launch, self.state[task.rank]
        task.saved = tuple(memory.clone() for memory in task.states)
        given = [result for k, result in enumerate(task.results) if k not in launch.op.viewed()]
        for tensor in (*given, *task.states, *task.ruined):
            _poison(tensor)
        for name in launch.op.uses:
            state.scratch[name] = task
        if launch.op.communicates:
            self.entered[task.rank][_lane(task)].append(task)

    def met(self, task: _Task) -> bool:
        """A collective ends when every rank of its group has entered its n-th one."""
        lane = _lane(task)
        turn = self.entered[task.rank][lane].index(task)
        return all(len(self.entered[rank][lane]) > turn for rank in self.machine.partners(task.launch, task.rank))

    def end(self, task: _Task) -> None:
        launch, state = task.launch, self.state[task.rank]
        for name in launch.op.uses:
            task.spoiled |= state.scratch[name] is not task
            state.scratch[name] = object()
        for memory, held in zip(task.states, task.saved, strict=True):
            memory.copy_(held)
        results = self.exchange(task) if launch.op.communicates else self.compute(task)
        for k, tensor in enumerate(task.results):
            if k in launch.op.viewed():
                continue
            if task.spoiled or results is None:
                _poison(tensor)
            elif k not in launch.op.written().values():
                tensor.copy_(results[k])

    def compute(self, task: _Task) -> Sequence[torch.Tensor] | None:
        results: Sequence[torch.Tensor] | None = self.call(self.machine.rules[task.index][task.rank], *task.operands)
        return self.hold(task, results)

    def exchange(self, task: _Task) -> Sequence[torch.Tensor] | None:
        """The first rank to end computes for its group; a pair of different collectives is garbage."""
        lane = _lane(task)
        turn = self.entered[task.rank][lane].index(task)
        partners = [self.entered[rank][lane][turn] for rank in self.machine.partners(task.launch, task.rank)]
        if task.exchanged is None:
            same = all(partner.index == task.index for partner in partners)
            operands = [x for partner in partners for x in partner.operands]
            found = self.call(self.machine.rules[task.index][task.rank], *operands) if same else None
            count = len(task.results)
            for number, partner in enumerate(partners if same else [task]):
                partner.exchanged = [found[number * count : (number + 1) * count]] if found is not None else []
        return self.hold(task, task.exchanged[0] if task.exchanged else None)

    def hold(self, task: _Task, results: Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor] | None:
        """What the rule gave, if it is what a rule may give."""
        if results is not None:
            try:
                check_results(task.launch, task.operands, results, [self.machine.avals[n] for n in task.launch.results])
            except ContractError as error:
                self.error = self.error or RunError(task.launch, task.rank, error)
                return None
        return results

    def call(self, rule: Rule, *operands: Any) -> Any:
        """A rule may choke on garbage that a race left it; in a legal program it may not."""
        try:
            return rule(*operands)
        except Exception as error:
            self.error = self.error or error
            return None


def _lane(task: _Task) -> str:
    """Which collectives this one is counted with: those of its group, where that is independent; all others."""
    group = task.launch.op.group_of()
    return group.name if group is not None and group.independent else ""


def _nothing() -> None:
    pass


def _zeros(aval: Aval, *, on_host: bool) -> Any:
    return (0,) * aval.shape[0] if on_host else torch.zeros(aval.shape, dtype=DTYPES[aval.dtype])


def _poisoned(aval: Aval) -> torch.Tensor:
    tensor = torch.empty(aval.shape, dtype=DTYPES[aval.dtype])
    _poison(tensor)
    return tensor


def _poison(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
