"""The hostile machine: a program run late and out of order, by a seed.

It does whatever the law of a program allows a device to do, and nothing else
is promised to a program:

    Every rank has a host that issues effects in order, and a queue per stream.  Which host or queue
    moves next is drawn at random; a queue only obeys its own order and the events it waits for.
    An op begins and ends in two moves, and others may move in between.  It reads at its end.
    Memory is NaN when it is allocated and again when the op that owns it begins.
    Dropped memory is handed to the very next launch on its home stream (any launch: operators allocate
    scratch too), which ruins it as it begins; kept memory only once the keeping streams got there.
    A state is NaN while an op writes it.  A workspace that somebody else touched between an op's begin
    and end makes its results NaN.
    Inputs arrive on the main stream; outputs are read there, whatever other streams still do.
    A collective pairs the n-th of each rank, whichever op that is; a wrong pair is NaN.
    Waiting for an event that has not been recorded does nothing.

Half of the seeds draw uniformly; the others give priorities and change them at
one to three points, which finds a race of small depth with a known probability
(PCT: Burckhardt et al., ASPLOS 2010).
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from mla_fx.backends.backend import Backend, Rule
from mla_fx.backends.inputs import DTYPES
from mla_fx.effects import MAIN, Aval, Drop, Keep, Launch, Program, Record, Wait

_Actor = tuple[int, str]  # rank, and a stream or the host
_HOST = "<host>"


@define(eq=False)
class _Mark:
    """A point in a queue: an event, or where a keeping stream was at a drop."""

    passed: bool = False


@define(eq=False)
class _Task:
    """A launch on one rank."""

    index: int  # of the launch in the program
    launch: Launch
    rank: int
    operands: tuple[Any, ...]
    results: tuple[torch.Tensor, ...]
    ruined: list[torch.Tensor]  # dropped memory that this launch takes
    saved: dict[int, torch.Tensor] = field(factory=dict)  # state operand -> what it held
    spoiled: bool = False
    exchanged: list[tuple[torch.Tensor, ...]] | None = None  # what a collective gave this rank; empty: garbage


@frozen(eq=False)
class _Move:
    """An entry of a queue: what to do, and when it may be done."""

    act: Callable[[], None]
    ready: Callable[[], bool]


def _always() -> bool:
    return True


@define(eq=False)
class _Rank:
    """One rank: its host's position, its queues and its memory."""

    next_effect: int = 0
    queues: dict[str, deque[_Move]] = field(factory=lambda: defaultdict(deque))
    values: dict[str, Any] = field(factory=dict)
    events: dict[str, _Mark] = field(factory=dict)
    kept: dict[str, set[str]] = field(factory=lambda: defaultdict(set))
    free: dict[str, list[torch.Tensor]] = field(factory=lambda: defaultdict(list))
    pending: list[tuple[list[_Mark], str, torch.Tensor]] = field(factory=list)
    scratch: dict[str, object] = field(factory=dict)
    read: dict[str, torch.Tensor] = field(factory=dict)


class Adversary:
    """The body of an adversarial executable: flat inputs to flat outputs, rank after rank."""

    def __init__(self, program: Program, backend: Backend, *, seed: int, legal: bool) -> None:
        self.program, self.seed, self.legal, self.ranks = program, seed, legal, backend.ranks
        self.avals, self.root, self.home = program.avals(), program.memory(), program.home()
        self.rules: list[list[Rule]] = [
            [backend.bound(launch, rank) for rank in range(backend.ranks)] for launch in program.launches
        ]
        number = iter(range(len(program.launches)))
        self.index = [next(number) if isinstance(effect, Launch) else -1 for effect in program.effects]
        self.states = program.states()

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        """One run; with the same seed and inputs, the same moves."""
        run = _Run(self, random.Random(self.seed))
        given = {
            (i.name, rank): leaves[k * self.ranks + rank]
            for k, i in enumerate(self.program.inputs)
            for rank in range(self.ranks)
        }
        run.start(given)
        run.drive()
        if self.legal and run.error is not None:
            raise run.error
        for name in self.states:
            for rank in range(self.ranks):
                given[name, rank].copy_(run.state[rank].read[name])
        return tuple(
            given[self.root[name], rank] if self.root[name] in self.states else run.state[rank].read[name]
            for name in self.program.outputs
            for rank in range(self.ranks)
        )


class _Run:
    """One execution."""

    def __init__(self, machine: Adversary, draw: random.Random) -> None:
        self.machine, self.draw = machine, draw
        self.state = [_Rank() for _ in range(machine.ranks)]
        self.entered: dict[str, list[list[_Task]]] = defaultdict(lambda: [[] for _ in self.state])
        self.error: Exception | None = None

    # --- who moves next ----------------------------------------------------

    def drive(self) -> None:
        """Let hosts and queues move until nothing is left."""
        streams = [*self.machine.program.streams]
        actors: list[_Actor] = [(r, s) for r in range(len(self.state)) for s in (_HOST, *streams)]
        choose = self.draw.choice if self.draw.random() < 0.5 else self.by_priority(actors)
        while ready := [actor for actor in actors if self.can_move(*actor)]:
            rank, where = choose(ready)
            if where == _HOST:
                self.issue(rank)
            else:
                self.state[rank].queues[where].popleft().act()
        left = sum(len(queue) for state in self.state for queue in state.queues.values())
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

    def can_move(self, rank: int, where: str) -> bool:
        state = self.state[rank]
        if where == _HOST:
            return state.next_effect <= len(self.machine.program.effects)
        queue = state.queues[where]
        return bool(queue) and queue[0].ready()

    # --- the host ----------------------------------------------------------

    def start(self, given: dict[tuple[str, int], Any]) -> None:
        """Working copies of the inputs are NaN until they arrive on the main stream."""
        for rank, state in enumerate(self.state):
            arriving = []
            for put in self.machine.program.inputs:
                leaf = given[put.name, rank]
                if isinstance(leaf, torch.Tensor):
                    state.values[put.name] = _poisoned(put.aval)
                    arriving.append((state.values[put.name], leaf))
                else:
                    state.values[put.name] = leaf

            def arrive(arriving: list[tuple[torch.Tensor, torch.Tensor]] = arriving) -> None:
                for mine, leaf in arriving:
                    mine.copy_(leaf)

            state.queues[MAIN].append(_Move(arrive, _always))

    def issue(self, rank: int) -> None:
        """The host of a rank issues its next effect; after the last, the reading of the outputs."""
        state, program = self.state[rank], self.machine.program
        position = state.next_effect
        state.next_effect += 1
        if position == len(program.effects):
            state.queues[MAIN].append(_Move(lambda: self.read(state), _always))
            return
        match effect := program.effects[position]:
            case Launch():
                self.launch(rank, state, effect, self.machine.index[position])
            case Record():
                mark = state.events[effect.event] = _Mark()
                state.queues[effect.stream].append(_Move(lambda: _pass(mark), _always))
            case Wait():
                event = state.events.get(effect.event, _Mark(passed=True))
                state.queues[effect.stream].append(_Move(_nothing, lambda: event.passed))
            case Keep():
                state.kept[self.machine.root[effect.value]].add(effect.stream)
            case Drop():
                self.drop(state, self.machine.root[effect.value])

    def launch(self, rank: int, state: _Rank, launch: Launch, index: int) -> None:
        operands = tuple(state.values[name] for name in launch.operands)
        versions = {result: operands[operand] for operand, result in launch.op.writes.items()}
        results = tuple(
            versions[k] if k in versions else _poisoned(self.machine.avals[name])
            for k, name in enumerate(launch.results)
        )
        state.values.update(zip(launch.results, results, strict=True))
        ruined = state.free.pop(launch.stream, [])
        for entry in [e for e in state.pending if e[1] == launch.stream and all(mark.passed for mark in e[0])]:
            state.pending.remove(entry)
            ruined.append(entry[2])
        task = _Task(index, launch, rank, operands, results, ruined)
        queue = state.queues[launch.stream]
        queue.append(_Move(lambda: self.begin(task), _always))
        queue.append(_Move(lambda: self.end(task), lambda: self.met(task)))

    def drop(self, state: _Rank, memory: str) -> None:
        tensor, home = state.values[memory], self.machine.home.get(memory)
        if home is None:
            return  # an input: the caller still has it
        marks = []
        for stream in sorted(state.kept.pop(memory, ())):
            marks.append(mark := _Mark())
            state.queues[stream].append(_Move(lambda mark=mark: _pass(mark), _always))  # type: ignore[misc]
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
        written = launch.op.writes
        for operand in written:
            task.saved[operand] = task.operands[operand].clone()
        for tensor in (*task.results, *task.ruined):
            _poison(tensor)
        for name in launch.op.uses:
            state.scratch[name] = task
        if launch.op.communicates:
            self.entered[launch.op.communicates][task.rank].append(task)

    def met(self, task: _Task) -> bool:
        """A collective ends when every rank has entered its n-th one."""
        group = task.launch.op.communicates
        if group is None:
            return True
        turns = self.entered[group]
        turn = turns[task.rank].index(task)
        return all(len(rank) > turn for rank in turns)

    def end(self, task: _Task) -> None:
        launch, state = task.launch, self.state[task.rank]
        for name in launch.op.uses:
            task.spoiled |= state.scratch[name] is not task
            state.scratch[name] = object()
        for operand, held in task.saved.items():
            task.operands[operand].copy_(held)
        results = self.exchange(task) if launch.op.communicates else self.compute(task)
        for k, tensor in enumerate(task.results):
            if task.spoiled or results is None:
                _poison(tensor)
            elif k not in launch.op.writes.values():
                tensor.copy_(results[k])

    def compute(self, task: _Task) -> Sequence[torch.Tensor] | None:
        results: Sequence[torch.Tensor] | None = self.call(self.machine.rules[task.index][task.rank], *task.operands)
        return results

    def exchange(self, task: _Task) -> Sequence[torch.Tensor] | None:
        """The first rank to end computes for all; a pair of different collectives is garbage for all."""
        turns = self.entered[task.launch.op.communicates or ""]
        turn = turns[task.rank].index(task)
        partners = [rank[turn] for rank in turns]
        if task.exchanged is None:
            same = all(partner.index == task.index for partner in partners)
            rule = self.machine.rules[task.index][0]
            found = self.call(rule, [partner.operands for partner in partners]) if same else None
            for rank, partner in enumerate(partners):
                partner.exchanged = [found[rank]] if found is not None else []
        return task.exchanged[0] if task.exchanged else None

    def call(self, rule: Rule, *operands: Any) -> Any:
        """A rule may choke on garbage that a race left it; in a legal program it may not."""
        try:
            return rule(*operands)
        except Exception as error:
            self.error = self.error or error
            return None


def _nothing() -> None:
    pass


def _pass(mark: _Mark) -> None:
    mark.passed = True


def _poisoned(aval: Aval) -> torch.Tensor:
    tensor = torch.empty(aval.shape, dtype=DTYPES[aval.dtype])
    _poison(tensor)
    return tensor


def _poison(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
