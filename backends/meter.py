"""What runs really move and hold: counted at the world, and at the results of rules while they are alive.

A `Metered` backend runs what another one runs, and counts.  It is slower, and nothing of it is on the way of a backend
that is not metered.  The n-th call of the world in a run is the n-th collective of the program, so every program runs
in issue order: the hostile machine, which does not, cannot be metered.

    sent     what a rank hands over for other ranks: everything, to each of them, where all gather; the parts of the
             others, where each gets its own; of a sum, what a ring would send of it, since how a transport adds is
             its own affair (see `mla_fx.effects.cost`)
    messages what the transport is asked for, counted there; one for each collective where all ranks are in one process
    values   bytes of memory that results of rules lie in, as long as anything holds it; states and what is a view of
             an input do not count

What a rule makes for itself, as the payload of an exchange, is not seen.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from attrs import define, evolve, field, frozen
from torch.utils._python_dispatch import TorchDispatchMode

from mla_fx.backends.backend import Backend, Executable
from mla_fx.backends.peers import Peers
from mla_fx.backends.prepared import Prepared
from mla_fx.backends.table import Collective, Rule
from mla_fx.backends.world import World
from mla_fx.effects import InputError, Launch, Program, cost
from mla_fx.effects.cost import on_the_wire
from mla_fx.effects.op import Meeting
from mla_fx.layout import Layout


@define
class Tally:
    """Of the calls of one collective: `messages` to the transport, bytes `sent` to others, and both by the formula.

    `most`: the formula says how many bytes they are at most, since data decide.
    """

    messages: int = 0
    sent: int = 0
    messages_priced: int = 0
    priced: int = 0
    most: bool = False

    def add(self, other: "Tally") -> None:
        """Take another one into account."""
        self.messages += other.messages
        self.sent += other.sent
        self.messages_priced += other.messages_priced
        self.priced += other.priced
        self.most |= other.most

    def __str__(self) -> str:
        if self.most and self.messages == self.messages_priced and self.sent <= self.priced:
            return f"{self.messages} messages, {self.sent:,} bytes, of at most {self.priced:,} by the formula"
        alike = (self.messages, self.sent) == (self.messages_priced, self.priced)
        priced = (
            "as the formula says" if alike else f"where the formula says {self.messages_priced} and {self.priced:,}"
        )
        return f"{self.messages} messages, {self.sent:,} bytes, {priced}"


@frozen
class Place:
    """Where bytes were moved: on which rank, in which scope of the program, by which op, over which group."""

    rank: int
    tag: str
    op: str
    group: str


@define(eq=False)
class Meter:
    """Counts over all runs so far.

    `moved` has a tally for each place; `values`, by rank, the most bytes that results of a run held at once, and
    `values_priced` the most that the programs' cost says.
    """

    moved: dict[Place, Tally] = field(factory=lambda: defaultdict(Tally))
    values: dict[int, int] = field(factory=lambda: defaultdict(int))
    values_priced: int = 0
    _calls: list[list[tuple[int, Tally]]] = field(factory=list)  # of a run: by rank that sent, what it did
    _alive: dict[int, dict[int, int]] = field(factory=lambda: defaultdict(dict))  # by rank and storage

    def counting(self, program: Program, body: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Any]:
        """The body of an executable, each run of which is counted."""
        found = cost(program)

        def counted(leaves: list[Any]) -> Sequence[Any]:
            self._calls, self._alive = [], defaultdict(dict)
            results = body(leaves)
            for message, call in zip(found.messages, self._calls, strict=True):
                for rank, tally in call:
                    self.moved[_place(message.launch, rank)].add(evolve(tally, priced=message.sent))
            self.values_priced = max(self.values_priced, found.memory.peak)
            return results

        return counted

    def call(self, sent: list[tuple[int, Tally]]) -> None:
        """The world was asked to move something: what each rank here sent to others."""
        self._calls.append(sent)

    def rule(self, rule: Rule | Collective) -> Rule | Collective:
        """A rule whose results are counted while anything holds their memory."""
        if isinstance(rule, Collective):
            return Collective(rule.send, self._counted(rule.receive, moved=1))  # which may be the result
        return self._counted(rule)

    def _counted(self, rule: Rule, moved: int = 0) -> Rule:
        def counted(*operands: Any, run: Any, **parameters: Any) -> Any:
            results = rule(*operands, run=run, **parameters)
            tensors = [x for x in operands[moved:] if isinstance(x, torch.Tensor)]
            given = {_storage(x) for x in tensors if x.layout is torch.strided}  # what a library has packed has none
            for result in results:
                if _storage(result) not in given:
                    self._hold(result.untyped_storage(), self._alive[run.number])
            self.values[run.number] = max(self.values[run.number], sum(self._alive[run.number].values()))
            return results

        return counted

    def _hold(self, storage: Any, alive: dict[int, int]) -> None:
        """Count a storage until nothing holds it; a run has a dictionary of its own, so what it leaves is forgotten."""
        if storage._cdata not in alive:
            alive[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, alive.pop, storage._cdata, None)


def _storage(tensor: torch.Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


def _place(launch: Launch, rank: int) -> Place:
    return Place(rank, launch.tag, launch.op.name, str(launch.op.group_of()))


@frozen(eq=False)
class Counting:
    """A world whose calls are counted."""

    world: World
    meter: Meter

    @property
    def layout(self) -> Layout:
        """As the world."""
        return self.world.layout

    @property
    def here(self) -> range:
        """As the world."""
        return self.world.here

    @property
    def peers(self) -> Peers | None:
        """As the world."""
        return self.world.peers

    def move(self, how: Meeting, sent: Sequence[Any], *, group: str, spent: bool = False) -> list[Any]:
        """See `World.move`."""
        with _Messages() as asked:
            moved = self.world.move(how, sent, group=group, spent=spent)
        nothing = how != "all_to_all_v" and not sent[0].numel()
        priced = 0 if nothing else self.world.messages(how, group)
        messages = asked.count if self.peers else priced  # without a transport there is nothing to count
        size = self.layout.group(group).size
        others = (
            _to_others(how, one, size, self.layout.index(group, rank))
            for rank, one in zip(self.here, sent, strict=True)
        )
        self.meter.call(
            [
                (rank, Tally(messages, bytes_, priced, most=how == "all_to_all_v"))
                for rank, bytes_ in zip(self.here, others, strict=True)
            ]
        )
        return moved

    def messages(self, how: Meeting, group: str) -> int:
        """As the world."""
        return self.world.messages(how, group)

    def share(self, value: Any) -> list[Any]:
        """As the world."""
        return self.world.share(value)


class _Messages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what the transports of `torch.distributed` are asked for in here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled around it: the first call would load torch's compiler for that, two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def _to_others(how: Meeting, sent: Any, ranks: int, mine: int) -> int:
    """Bytes of what a rank hands over that are for others, message by message."""
    others = [rank for rank in range(ranks) if rank != mine]
    match how:
        case "all_gather":
            return sum(sent.nbytes for _ in others)
        case "all_to_all":
            return sum(sent[rank].nbytes for rank in others)
        case "all_to_all_v":
            rows, counts = sent
            return sum(counts[rank] * rows.shape[1] * rows.element_size() + 8 for rank in others)
        case "all_reduce":
            return on_the_wire(how, ranks, sent.nbytes)


@frozen(eq=False)
class Metered(Backend):
    """A backend that counts; its `meter` has what it counted."""

    meter: Meter = field(factory=Meter, kw_only=True)

    @classmethod
    def of(cls, backend: Backend) -> "Metered":
        """Another backend, metered; raises `InputError` for a hostile machine."""
        if backend.adversary is not None:
            raise InputError(f"adversary: a hostile machine cannot be metered: got seed {backend.adversary}")
        meter = Meter()
        fields = {one.name: getattr(backend, one.name) for one in attrs.fields(Backend)}
        rules = {op: meter.rule(rule) for op, rule in backend.table.rules.items()}
        counted = {"table": evolve(backend.table, rules=rules), "world": Counting(backend.world, meter), "apart": True}
        return cls(**{**fields, **counted}, meter=meter)

    def compile(
        self, program: Program, prepared: Prepared | None = None, *, unchecked: bool = False, capture: bool = False
    ) -> Executable:
        """See `Backend.compile`; a replay of a graph asks neither rules nor the world, so nothing is captured."""
        if capture:
            raise InputError("capture: a metered program runs launch by launch: got True")
        made = super().compile(program, prepared, unchecked=unchecked)
        return evolve(made, body=self.meter.counting(made.program, made.body))
