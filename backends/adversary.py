"""The hostile machine: a program run late and out of order, by a seed.

It does whatever the law of a program allows a device to do, and nothing else
is promised to a program.  How queues and launches move is said in
`mla_fx.backends.hostile`; here is what a program asks of them:

    Every rank has a host that issues effects in order, and a queue per stream.
    Dropped memory is handed to the very next launch on its home stream (any launch: operators allocate
    scratch too), which ruins it as it begins; kept memory only once the keeping streams got there.
    Inputs arrive on the main stream, staged ones when they are sent; outputs are read there, whatever other
    streams still do.
    Waiting for an event that has not been recorded does nothing.
"""

import random
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from mla_fx.backends.contract import check_results
from mla_fx.backends.hostile import Hostile, Mark, Move, Task, nothing, poisoned
from mla_fx.backends.prepared import Prepared
from mla_fx.backends.rows import RunError
from mla_fx.backends.rules import collective_of, forming_rule
from mla_fx.backends.table import Rule
from mla_fx.dtypes import DTYPES
from mla_fx.effects import MAIN, Aval, Drop, Effect, Keep, Launch, Program, Record, Stage, Wait

if TYPE_CHECKING:
    from mla_fx.backends.backend import Backend

_HOST = "<host>"


@define(eq=False)
class _Rank:
    """One rank: its queues and its memory.  The host is a queue too, of the effects it has yet to issue."""

    queues: dict[str, deque[Move]]
    values: dict[str, Any] = field(factory=dict)
    events: dict[str, Mark] = field(factory=dict)
    kept: dict[str, set[str]] = field(factory=lambda: defaultdict(set))
    free: dict[str, list[torch.Tensor]] = field(factory=lambda: defaultdict(list))
    pending: list[tuple[list[Mark], str, torch.Tensor]] = field(factory=list)
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

    def task(self, launch: Launch, rank: int, index: int, same: Hashable, *memory: Any) -> Task:
        """A launch, the program's number `index`, on one rank over memory; see `Task`."""
        partners = self.partners(launch, rank) if launch.op.communicates else ()
        avals = [self.avals[name] for name in launch.results]
        return Task(launch, rank, same, partners, self.rules[index][rank], avals, *memory)

    def __call__(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """One run; with the same seed and inputs, the same moves."""
        run = _Run(self, random.Random(self.seed))
        given, loaded = {}, iter(leaves)
        for put in self.program.inputs:
            of_ranks = iter(self.prepared.of(put)) if put.role == "parameter" and self.prepared else loaded
            given.update({(put.name, rank): next(of_ranks) for rank in range(self.ranks)})
        run.start(given)
        run.drive(3 * len(self.program.effects) * self.ranks)
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


class _Run(Hostile):
    """One execution."""

    def __init__(self, machine: Adversary, draw: random.Random) -> None:
        super().__init__(machine.ranks, draw)
        self.machine = machine
        names = (_HOST, *machine.program.streams)
        self.state = [_Rank({name: deque() for name in names}) for _ in range(machine.ranks)]
        for rank, state in enumerate(self.state):
            self.queues.update({(rank, name): queue for name, queue in state.queues.items()})

    # --- the host ----------------------------------------------------------

    def start(self, given: dict[tuple[str, int], Any]) -> None:
        """Working copies of the inputs are NaN until they arrive on the main stream; the host has all yet to issue."""
        for rank, state in enumerate(self.state):
            arriving: list[str] = []
            for put in self.machine.program.inputs:
                leaf = given[put.name, rank]
                if isinstance(leaf, torch.Tensor):
                    state.values[put.name] = poisoned(put.aval)
                    state.sent[put.name] = leaf
                    if put.place != "staged":
                        arriving.append(put.name)
                else:
                    state.values[put.name] = leaf
            state.queues[MAIN].append(Move(partial(self.arrive, state, arriving)))
            effects = zip(self.machine.index, self.machine.program.effects, strict=True)
            state.queues[_HOST].extend(Move(partial(self.issue, rank, state, *one)) for one in effects)
            state.queues[_HOST].append(Move(partial(self.finish, state)))

    def arrive(self, state: _Rank, names: Sequence[str]) -> None:
        for name in names:
            state.values[name].copy_(state.sent[name])

    def finish(self, state: _Rank) -> None:
        """The host has issued all effects: outputs are read on the main stream, behind what it has been given."""
        state.queues[MAIN].append(Move(partial(self.read, state)))

    def issue(self, rank: int, state: _Rank, index: int, effect: Effect) -> None:
        """The host of a rank issues an effect; `index` numbers launches."""
        match effect:
            case Launch():
                self.launch(rank, state, effect, index)
            case Stage():
                state.queues[MAIN].append(Move(partial(self.arrive, state, effect.values)))
            case Record():
                mark = state.events[effect.event] = Mark()
                state.queues[effect.stream].append(Move(mark.passes))
            case Wait():
                event = state.events.get(effect.event, Mark(passed=True))
                state.queues[effect.stream].append(Move(nothing, lambda: event.passed))
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
            else poisoned(machine.avals[name])
            for name in launch.results
        )
        state.values.update(zip(launch.results, results, strict=True))
        ruined = state.free.pop(launch.stream, [])
        for entry in [e for e in state.pending if e[1] == launch.stream and all(mark.passed for mark in e[0])]:
            state.pending.remove(entry)
            ruined.append(entry[2])
        states = tuple(state.values[machine.root[launch.operands[position]]] for position in launch.op.written())
        memory = operands, results, ruined, states, launch.op.uses
        task = machine.task(launch, rank, index, index, *memory)
        queue = state.queues[launch.stream]
        queue.append(Move(partial(self.begin, task)))
        queue.append(Move(partial(self.end, task), partial(self.met, task) if launch.op.communicates else None))

    def drop(self, state: _Rank, memory: str) -> None:
        tensor, home = state.values[memory], self.machine.home.get(memory)
        if home is None:
            return  # an input: the caller still has it
        marks = []
        for stream in sorted(state.kept.pop(memory, ())):
            marks.append(mark := Mark())
            state.queues[stream].append(Move(mark.passes))
        if marks:
            state.pending.append((marks, home, tensor))
        else:
            state.free[home].append(tensor)

    def read(self, state: _Rank) -> None:
        """On the main stream, after all that was issued to it: what the caller gets."""
        for name in (*self.machine.program.outputs, *self.machine.states):
            state.read[name] = state.values[name].clone()


def _zeros(aval: Aval, *, on_host: bool) -> Any:
    return (0,) * aval.shape[0] if on_host else torch.zeros(aval.shape, dtype=DTYPES[aval.dtype])
