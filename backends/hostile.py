"""What the hostile machine is made of: queues whose next move is drawn, and launches that begin and end.

    A queue obeys its own order and what its moves wait for; which queue moves next is drawn at random.
    An op begins and ends in two moves, and others may move in between.  It reads at its end.
    Memory is NaN when it is allocated and again when the op that owns it begins; so is what the op is handed beside it.
    A state is NaN while an op writes it, all of its memory where what is written is a view.  A workspace that somebody
    else touched between an op's begin and end makes its results NaN.
    A collective pairs the n-th of each rank of its group, whichever op and group that is; a wrong pair is NaN.  Those
    of a group that is declared independent are counted apart.

Half of the seeds draw uniformly; the others give priorities and change them at
one to three points, which finds a race of small depth with a known probability
(PCT: Burckhardt et al., ASPLOS 2010).
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from attrs import define, frozen

from mla_fx.backends.contract import ContractError, check_results
from mla_fx.backends.rows import RunError
from mla_fx.backends.table import Rule
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, Launch

Actor = tuple[int, str]  # rank, and the name of a queue


@define(eq=False)
class Mark:
    """A point in a queue: an event, or where a stream was at some time."""

    passed: bool = False

    def passes(self) -> None:
        """The queue is there."""
        self.passed = True


@define(eq=False)
class Task:
    """A launch on one rank."""

    launch: Launch
    rank: int
    same: Hashable  # what the launches of all ranks have in common
    partners: Sequence[int]  # the ranks that a collective meets
    rule: Rule  # of a collective, one for its group
    avals: Sequence[Aval]  # of the results
    operands: tuple[Any, ...]
    results: tuple[torch.Tensor, ...]
    ruined: Sequence[torch.Tensor]  # memory that this launch is handed beside its results
    states: tuple[torch.Tensor, ...]  # the memory that it writes in place
    rooms: Sequence[Hashable]  # workspaces
    saved: tuple[torch.Tensor, ...] = ()  # what the states held
    spoiled: bool = False
    exchanged: list[tuple[torch.Tensor, ...]] | None = None  # what a collective gave this rank; empty: garbage


@frozen(eq=False)
class Move:
    """An entry of a queue: what to do, and when it may be done (None: at any time)."""

    act: Callable[[], None]
    ready: Callable[[], bool] | None = None


class HangError(RuntimeError):
    """Queues that wait for each other."""


class Hostile:
    """Queues and running launches of all ranks."""

    def __init__(self, ranks: int, draw: random.Random) -> None:
        self.draw = draw
        self.queues: dict[Actor, deque[Move]] = {}
        self.scratch: list[dict[Hashable, object]] = [{} for _ in range(ranks)]  # workspace -> who touched it last
        # Collectives in the order of each rank, those of each independent group apart.
        self.entered: list[dict[str, list[Task]]] = [defaultdict(list) for _ in range(ranks)]
        self.error: Exception | None = None

    # --- who moves next ----------------------------------------------------

    def drive(self, steps: int) -> None:
        """Let queues move until nothing is left, which takes about so many steps; raises `HangError`."""
        queues = self.queues
        choose = self.draw.choice if self.draw.random() < 0.5 else self.by_priority(steps)
        # One look at the head of every queue for every move: nearly all the time that a run takes goes here.
        while ready := [one for one, queue in queues.items() if queue and (not queue[0].ready or queue[0].ready())]:
            queues[choose(ready)].popleft().act()
        left = sum(map(len, queues.values()))
        if left:
            raise HangError(f"each of {left} moves waits for another")

    def by_priority(self, steps: int) -> Callable[[Sequence[Actor]], Actor]:
        """Queues by a priority of each, which changes at some of these steps."""
        order = {actor: self.draw.random() for actor in self.queues}
        changes = {self.draw.randrange(steps) for _ in range(self.draw.randint(1, 3))}
        count = iter(range(10**9))

        def choose(ready: Sequence[Actor]) -> Actor:
            for actor in ready:
                if actor not in order:
                    order[actor] = self.draw.random()
            first = max(ready, key=order.__getitem__)
            if next(count) in changes:
                order[first] = -self.draw.random()
            return first

        return choose

    # --- launches ------------------------------------------------------------

    def begin(self, task: Task) -> None:
        """The launch has its memory from here on."""
        launch, scratch = task.launch, self.scratch[task.rank]
        task.saved = tuple(memory.clone() for memory in task.states)
        given = [result for k, result in enumerate(task.results) if k not in launch.op.viewed()]
        for tensor in (*given, *task.states, *task.ruined):
            poison(tensor)
        for room in task.rooms:
            scratch[room] = task
        if launch.op.communicates:
            self.entered[task.rank][_lane(task)].append(task)

    def met(self, task: Task) -> bool:
        """A collective ends when every rank of its group has entered its n-th one."""
        lane = _lane(task)
        turn = self.entered[task.rank][lane].index(task)
        return all(len(self.entered[rank][lane]) > turn for rank in task.partners)

    def end(self, task: Task) -> None:
        """The launch reads and writes."""
        launch, scratch = task.launch, self.scratch[task.rank]
        for room in task.rooms:
            task.spoiled |= scratch[room] is not task
            scratch[room] = object()
        for memory, held in zip(task.states, task.saved, strict=True):
            memory.copy_(held)
        results = self._exchange(task) if launch.op.communicates else self._compute(task)
        for k, tensor in enumerate(task.results):
            if k in launch.op.viewed():
                continue
            if task.spoiled or results is None:
                poison(tensor)
            elif k not in launch.op.written().values():
                tensor.copy_(results[k])

    def _compute(self, task: Task) -> Sequence[torch.Tensor] | None:
        results: Sequence[torch.Tensor] | None = self._call(task.rule, *task.operands)
        return self._hold(task, results)

    def _exchange(self, task: Task) -> Sequence[torch.Tensor] | None:
        """The first rank to end computes for its group; a pair of different collectives is garbage."""
        lane = _lane(task)
        turn = self.entered[task.rank][lane].index(task)
        partners = [self.entered[rank][lane][turn] for rank in task.partners]
        if task.exchanged is None:
            same = all(partner.same == task.same for partner in partners)
            operands = [x for partner in partners for x in partner.operands]
            found = self._call(task.rule, *operands) if same else None
            count = len(task.results)
            for number, partner in enumerate(partners if same else [task]):
                partner.exchanged = [found[number * count : (number + 1) * count]] if found is not None else []
        return self._hold(task, task.exchanged[0] if task.exchanged else None)

    def _hold(self, task: Task, results: Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor] | None:
        """What the rule gave, if it is what a rule may give."""
        if results is not None:
            try:
                check_results(task.launch, task.operands, results, task.avals)
            except ContractError as error:
                self.error = self.error or RunError(task.launch, task.rank, error)
                return None
        return results

    def _call(self, rule: Rule, *operands: Any) -> Any:
        """A rule may choke on garbage that a race left it; in a legal program it may not."""
        try:
            return rule(*operands)
        except Exception as error:
            self.error = self.error or error
            return None


def _lane(task: Task) -> str:
    """Which collectives this one is counted with: those of its group, where that is independent; all others."""
    group = task.launch.op.group_of()
    return group.name if group is not None and group.independent else ""


def nothing() -> None:
    """What a queue does that only waits."""


def poisoned(aval: Aval) -> torch.Tensor:
    """Memory that nobody has written."""
    tensor = torch.empty(aval.shape, dtype=DTYPES[aval.dtype])
    poison(tensor)
    return tensor


def poison(tensor: torch.Tensor) -> None:
    """NaN, or the least integer; bytes that are NaN in any dtype."""
    if tensor.dtype is torch.uint8:
        tensor.fill_(255)
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
