"""From a program to the rows of an executable's body, effect by effect.

Effects that a device without streams has no use for have no row.  A program
that is captured has none for what is staged: that is sent before the graph.

All ranks that this process runs share the device's streams: a launch is a row
for each rank, one after the other on the stream it names; a collective is one
row for all; records, waits and the staging are issued once.  On the host ranks
share work: what is the same on several is a row for the first of them
(`mla_fx.backends.shared`).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

import torch
from attrs import define, field

from mla_fx.backends.prepared import Prepared
from mla_fx.backends.rows import Body, Row, takes_over
from mla_fx.backends.rules import bound, collective_of, met, parameters, rule_of, run_of, take_from
from mla_fx.backends.several import Several
from mla_fx.backends.shared import Sharers, Sharing, apart, of_launch, sharers, shares_work
from mla_fx.backends.staging import Staging
from mla_fx.backends.table import Collective, Form, Rule, formed, takes_any
from mla_fx.effects import MAIN, Aval, Drop, Input, Keep, Launch, Op, Program, Record, Stage, Wait

if TYPE_CHECKING:
    from mla_fx.backends.backend import Backend


@define(eq=False)
class Writer:
    """Writes the rows of a program, effect by effect; of one that is `captured`, its inputs come as they are in the
    graph, on the device.
    """

    program: Program
    backend: "Backend"
    prepared: Prepared | None
    captured: bool = False
    shared: Mapping[str, Sharers] = field(factory=dict)  # of every value, where ranks share work
    rows: list[Row] = field(factory=list)
    of: list[tuple[Launch | None, int | None]] = field(factory=list)
    place: dict[tuple[str, int], int] = field(factory=dict)  # value and rank -> where it is in the list
    # Value -> ranks -> where it is for all of these: several ranks' operands and results are one object.
    several: dict[str, dict[tuple[int, ...], int]] = field(factory=lambda: defaultdict(dict))
    tail: list[Any] = field(factory=list)
    loaded: int = 0
    current: str = MAIN  # the stream that the rows so far have made current
    by_form: dict[tuple[str, Form | None, int | tuple[int, ...]], int] = field(factory=dict)
    # A step of a deep model is thousands of rows: what is equal in them is one object, and places are used again, or
    # the processor would wait for memory at every row.
    rules: dict[Any, Rule] = field(factory=dict)
    takes: dict[tuple[int, ...], Callable[[list[Any]], Sequence[Any]]] = field(factory=dict)
    numbers: dict[int, int] = field(factory=dict)
    puts: dict[tuple[int, int], slice] = field(factory=dict)
    free: dict[int, list[int]] = field(factory=lambda: defaultdict(list))  # size -> where such room has been emptied
    held: dict[int, list[int]] = field(factory=dict)  # place -> start, size and full places of its room
    avals: Mapping[str, Aval] = field(init=False)
    root: Mapping[str, str] = field(init=False)  # value -> the value in whose memory it lies
    lies: Mapping[str, list[str]] = field(init=False)  # that value -> all in its memory
    parameters: Mapping[str, Input] = field(init=False)
    spent: frozenset[str] = field(init=False)
    own: Sharers = field(init=False)  # every rank for itself

    def __attrs_post_init__(self) -> None:
        self.avals, self.root, self.spent = self.program.avals(), self.program.memory(), self.program.spent()
        self.own = apart(self.backend)
        self.lies = defaultdict(list)
        for name, memory in self.root.items():
            self.lies[memory].append(name)
        self.parameters = {put.name: put for put in self.program.inputs if put.role == "parameter"}

    def write(self) -> Body:
        """The body."""
        ranks, device = self.backend.here, self.backend.device
        for put in self.program.inputs:
            for rank in ranks if put.role != "parameter" else ():
                self.place[put.name, rank] = self.loaded
                self.loaded += 1
        named = {*self.program.outputs, *(e.value for e in self.program.effects if isinstance(e, Keep))}
        for name in named & self.parameters.keys():
            self.place.update({(name, rank): self.parameter(name, None, rank) for rank in ranks})
        given = dict(self.place)  # an output that is an input is that input, staged or not
        for effect in self.program.effects:
            self.effect(effect)
        copies = self.outputs()
        found = {(name, rank): self.at(name, rank) for name in self.program.outputs for rank in ranks}
        found |= {**given, **copies}
        taken = tuple(found[name, rank] for name in self.program.outputs for rank in ranks)
        others = tuple(device.stream(name) for name in self.program.streams[1:]) if device.has_streams else ()
        if device.has_streams:
            device.module.synchronize()  # what parameters became in their forms may be read on any stream from here on
        rows, of, tail = tuple(self.rows), tuple(self.of), tuple(self.tail)
        return Body(rows, of, tail, taken, take_from(taken), self.backend, others, self.avals, self.spent)

    def outputs(self) -> dict[tuple[str, int], int]:
        """Where copies lie of outputs that ranks share: who is given one may write it."""
        places: dict[tuple[str, int], int] = {}
        ours = {put.name for put in self.program.inputs}
        for name in dict.fromkeys(self.program.outputs) if self.shared else ():
            of: dict[int, list[int]] = defaultdict(list)  # place -> ranks that are given a copy of what lies there
            for rank, first in zip(self.backend.here, self.shared[name], strict=True):
                if rank != self.backend.here[first] and self.root[name] not in ours:
                    of[self.at(name, rank)].append(rank)
            for place, ranks in of.items():
                copies = self.results(len(ranks))
                self.row(partial(_copies, len(ranks)), [place], copies)
                places.update({(name, rank): copy for rank, copy in zip(ranks, copies, strict=True)})
        return places

    def room(self, *leaves: Any) -> int:
        """Place behind all others, for values that are there or to come."""
        self.tail += leaves
        return self.loaded + len(self.tail) - len(leaves)

    def number(self, place: int) -> int:
        """A place, as one object however often it is named."""
        return self.numbers.setdefault(place, place)

    def results(self, count: int) -> list[int]:
        """Places side by side for the results of a row."""
        at = self.free[count].pop() if self.free[count] else self.room(*[None] * count)
        places = [self.number(at + k) for k in range(count)]
        room = [at, count, count]
        self.held.update((place, room) for place in places)
        return places

    def row(
        self,
        function: Callable[..., Sequence[Any]],
        take: Sequence[int],
        put: Sequence[int] = (),
        launch: Launch | None = None,
        rank: int | None = None,
    ) -> None:
        """A row, of a launch or of none."""
        taken = tuple(take)
        if taken not in self.takes:
            self.takes[taken] = take_from(taken)
        span = (put[0], put[-1] + 1) if put else (0, 0)
        at = put[0] if len(put) == 1 else None
        self.rows.append((function, self.takes[taken], at, self.puts.setdefault(span, slice(*span)), ()))
        self.of.append((launch, rank))

    def effect(self, effect: Launch | Stage | Record | Wait | Keep | Drop) -> None:
        """The rows of an effect."""
        device = self.backend.device
        match effect:
            case Launch():
                self.enter(effect.stream)
                if effect.op.communicates:
                    self.collective(effect)
                else:
                    self.local(effect)
            case Drop():
                self.drop(effect)
            case Stage() if self.captured:
                pass
            case _ if not device.has_streams:
                pass  # one thread runs in issue order, which is a legal order: nothing to wait for
            case Stage():
                self.stage(effect)
            case Record():
                self.call(device.event(effect.event).record, effect.stream)
            case Wait():
                event = device.event(effect.event)
                self.call(lambda stream: stream.wait_event(event), effect.stream)
            case Keep():
                for rank in self.backend.here:
                    self.call(
                        lambda value, stream: value.record_stream(stream),
                        effect.stream,
                        self.place[effect.value, rank],
                    )
            case _:
                assert_never(effect)

    def local(self, launch: Launch) -> None:
        """A row for each rank, or for the first of those that share its results; one for all where a rule is."""
        here = self.backend.here
        of = of_launch(launch, self.shared, self.own) if self.shared else self.own
        ranks = tuple(rank for rank, first in zip(here, of, strict=True) if rank == here[first])
        forms = self.forms(launch)
        together = self.backend.table.together.get(type(launch.op)) if self.shared else None
        if together is not None and len(ranks) > 1 and not forms:
            if (launch.op, ranks) not in self.rules:
                runs = [run_of(self.backend, launch.op, rank) for rank in ranks]
                self.rules[launch.op, ranks] = bound(together, runs=runs, **parameters(launch.op))
            self.at_once(launch, self.rules[launch.op, ranks], ranks)
            return
        avals = [self.avals[name] for name in launch.operands]
        for rank in ranks:
            take = [self.operand(launch, position, name, rank) for position, name in enumerate(launch.operands)]
            places = self.results(len(launch.results))
            self.row(self.rule(launch.op, avals, rank, forms), take, places, launch, rank)
            mine = [other for other, first in zip(here, of, strict=True) if here[first] == rank]
            self.place.update(
                {(name, o): place for o in mine for name, place in zip(launch.results, places, strict=True)}
            )

    def at_once(self, launch: Launch, rule: Rule, ranks: tuple[int, ...]) -> None:
        """A row of a rule for several ranks."""
        take = self.of_several(launch, ranks)
        places = self.results(len(launch.results))
        self.row(rule, take, places, launch, None)
        for name, place in zip(launch.results, places, strict=True):
            self.several[name][ranks] = place

    def of_several(self, launch: Launch, ranks: tuple[int, ...]) -> list[int]:
        """Where operands lie for several ranks; those that lie there for each are put side by side first, in a row."""
        ready = {name for name in launch.operands if name in self.parameters and self.prepared is not None}
        apart = [
            name for name in dict.fromkeys(launch.operands) if name not in ready and ranks not in self.several[name]
        ]
        if apart:
            of = [[self.at(name, rank) for rank in ranks] for name in apart]
            of = [places[:1] if len(set(places)) == 1 else places for places in of]
            brought = self.results(len(apart))
            key = ("side by side", len(ranks), tuple(map(len, of)))
            function = self.rules.setdefault(key, partial(_side_by_side, *key[1:]))
            self.row(function, [place for places in of for place in places], brought)
            for name, place in zip(apart, brought, strict=True):
                self.several[name][ranks] = place
        return [
            self.parameter(name, self.kept(launch, k, name), ranks) if name in ready else self.several[name][ranks]
            for k, name in enumerate(launch.operands)
        ]

    def at(self, name: str, rank: int) -> int:
        """Where a value lies for one rank; what lies there for several is taken apart first."""
        if (name, rank) not in self.place:
            ((ranks, place),) = self.several[name].items()  # as it was made
            places = self.results(len(ranks))
            self.row(_entries, [place], places)
            here = self.backend.here
            of = dict(zip(ranks, places, strict=True))
            self.place.update(
                {(name, one): of[here[first]] for one, first in zip(here, self.shared[name], strict=True)}
            )
        return self.place[name, rank]

    def rule(self, op: Op, avals: Sequence[Aval], rank: int, forms: Mapping[int, Form]) -> Rule:
        """The rule of a local op on one rank, the same for all launches that are alike."""
        key = (op, tuple(avals), rank, tuple(forms.items()))
        if key not in self.rules:
            self.rules[key] = formed(rule_of(self.backend, op, avals, rank), forms)
        return self.rules[key]

    def forms(self, launch: Launch) -> dict[int, Form]:
        """The forms that operands must still be brought into, by position: parameters have been already."""
        wanted = [(k, name, self.backend.form(launch.op, k)) for k, name in enumerate(launch.operands)]
        return {k: form for k, name, form in wanted if form and (name not in self.parameters or self.prepared is None)}

    def operand(self, launch: Launch, position: int, name: str, rank: int) -> int:
        """Where an operand lies for one rank."""
        if name not in self.parameters or self.prepared is None:
            return self.at(name, rank)
        return self.parameter(name, self.kept(launch, position, name), rank)

    def kept(self, launch: Launch, position: int, name: str) -> Form | None:
        """The form that a launch takes a parameter in."""
        assert self.prepared is not None
        return (
            self.prepared.kept.get(name) if takes_any(launch.op, position) else self.backend.form(launch.op, position)
        )

    def parameter(self, name: str, form: Form | None, ranks: int | tuple[int, ...]) -> int:
        """Where a parameter lies in that form, for a rank or for several."""
        assert self.prepared is not None
        if (name, form, ranks) not in self.by_form:
            leaves = dict(zip(self.backend.here, self.prepared.of(self.parameters[name], form), strict=True))
            leaf = leaves[ranks] if isinstance(ranks, int) else Several([leaves[rank] for rank in ranks])
            self.by_form[name, form, ranks] = self.room(leaf)
        return self.by_form[name, form, ranks]

    def drop(self, drop: Drop) -> None:
        """Empty the places of all that lies in a value's memory behind the row before: any of them would hold it."""
        if not self.rows:
            self.row(lambda: (), ())
        names, ranks = self.lies[self.root[drop.value]], self.backend.here
        places = [self.place[name, rank] for name in names for rank in ranks if (name, rank) in self.place]
        places += [place for name in names for place in self.several[name].values()]
        *row, empty = self.rows[-1]
        self.rows[-1] = (*row, (*empty, *places))  # type: ignore[assignment]
        for room in (self.held.pop(place) for place in places if place in self.held):
            at, count, _ = room
            room[2] -= 1
            if not room[2]:
                self.free[count].append(at)

    def collective(self, launch: Launch) -> None:
        """One row for all ranks here."""
        ranks, count, rule = tuple(self.backend.here), len(launch.results), self.backend.table.rules[type(launch.op)]
        group = launch.op.group_of()
        assert group is not None and isinstance(rule, Collective)
        meets = bool(self.shared) and rule.together is not None
        key = (launch.op, takes_over(launch, self.spent))
        if key not in self.rules:
            self.rules[key] = (
                met(rule, launch.op)
                if meets
                else collective_of(self.backend, launch.op, spent=key[1], shared=bool(self.shared))
            )
        if meets and not launch.op.alike:
            return self.at_once(launch, self.rules[key], ranks)
        each = group.size if self.shared and launch.op.alike else 1  # so many ranks share results
        operands = list(enumerate(launch.operands))
        if meets:
            take = self.of_several(launch, ranks)
        else:
            take = [self.operand(launch, k, name, rank) for rank in ranks for k, name in operands]
        places = self.results(count * len(ranks) // each)
        self.row(self.rules[key], take, places, launch, None if len(ranks) > 1 else ranks[0])
        for number, rank in enumerate(ranks):
            mine = number // each * count
            self.place.update({(name, rank): places[mine + k] for k, name in enumerate(launch.results)})
        return None

    # --- on a device with streams ------------------------------------------------

    def call(self, function: Callable[..., Any], stream: str, *take: int) -> None:
        """A row that calls something of the device with values and a stream; main is whichever is the caller's."""
        device = self.backend.device
        if stream == MAIN:
            self.row(lambda *values: function(*values, device.caller) or (), take)
        else:
            handle = device.stream(stream)
            self.row(lambda *values: function(*values, handle) or (), take)

    def enter(self, stream: str) -> None:
        """Make a stream current, where another one was."""
        if self.backend.device.has_streams and stream != self.current:
            self.call(self.backend.device.module.set_stream, stream)
            self.current = stream

    def stage(self, stage: Stage) -> None:
        """Values go where the buffers of the executable are: their places hold what is on the device from there on."""
        ranks = self.backend.here
        self.enter(MAIN)
        staging = Staging.of([self.avals[name] for name in stage.values for _ in ranks], self.backend.device)
        staged = [(name, rank) for name in stage.values for rank in ranks]
        places = self.results(len(staged))
        self.row(staging.send, [self.place[one] for one in staged], places)
        self.place.update(dict(zip(staged, places, strict=True)))


def _side_by_side(ranks: int, counts: Sequence[int], *flat: Any) -> list[Several]:
    """Values of so many ranks, of which there is one for each, or the same for all."""
    found, at = [], 0
    for count in counts:
        found.append(Several(flat[at : at + count]) if count > 1 else Several.same(flat[at], ranks))
        at += count
    return found


def _copies(count: int, x: torch.Tensor) -> Sequence[torch.Tensor]:
    return x.expand(count, *x.shape).clone(memory_format=torch.contiguous_format).unbind()


def _entries(of: Sequence[Any]) -> Sequence[Any]:
    return tuple(of)


def body_of(program: Program, backend: "Backend", prepared: Prepared | None) -> Body | Sharing:
    """What runs a program; raises `InputError` where the device has no stream left for it."""
    if not shares_work(backend):
        return Writer(program, backend, prepared).write()

    def write(unlike: frozenset[str]) -> Body:
        return Writer(program, backend, prepared, shared=sharers(program, backend, prepared, unlike)).write()

    return Sharing.of(program, backend, sharers(program, backend, prepared), write)
