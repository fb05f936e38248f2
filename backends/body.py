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
from operator import itemgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, assert_never

import attrs
from attrs import define, field

from mla_fx.backends.device import Run
from mla_fx.backends.prepared import Prepared
from mla_fx.backends.rows import Body, Row, takes_over
from mla_fx.backends.shared import Sharers, Sharing, apart, of_launch, sharers, shares_work
from mla_fx.backends.staging import Staging
from mla_fx.backends.table import Collective, Form, Rule, formed, takes_any
from mla_fx.effects import MAIN, Aval, Drop, Input, Keep, Launch, Op, Program, Record, Stage, Wait
from mla_fx.effects.passes import definition

if TYPE_CHECKING:
    from mla_fx.backends.backend import Backend


def rule_of(backend: "Backend", op: Op, avals: Sequence[Aval], rank: int) -> Rule:
    """The rule of a local op with its parameters, for one rank; of an op without one, its definition's rules."""
    rule = backend.table.rules.get(type(op))
    if rule is None:
        return _by_definition(backend, op, avals, rank)
    assert not isinstance(rule, Collective)
    return bound(rule, run=run_of(backend, op, rank), **parameters(op))


def run_of(backend: "Backend", op: Op, rank: int) -> Run:
    """Where a rule of an op runs on one rank."""
    group = op.group_of()
    return Run(rank if group is None else backend.layout.index(group.name, rank), backend.device, rank)


def forming_rule(backend: "Backend", op: Op, avals: Sequence[Aval], rank: int) -> Rule:
    """The rule of a local op for operands as they are: it brings them into form itself."""
    forms = {k: form for k in range(len(avals)) if (form := backend.form(op, k))}
    return formed(rule_of(backend, op, avals, rank), forms)


def bound(rule: Rule, **given: Any) -> Rule:
    """A rule with its keywords given.

    Of a plain function, a copy that has them as defaults: a call of it costs a third of what `partial` makes of one,
    and there are thousands of them in a step.
    """
    if isinstance(rule, FunctionType):
        code = rule.__code__
        named = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        if set(given) <= set(named):
            made = FunctionType(code, rule.__globals__, rule.__name__, rule.__defaults__, rule.__closure__)
            made.__kwdefaults__ = {**(rule.__kwdefaults__ or {}), **given}
            return made
    return partial(rule, **given)


def _by_definition(backend: "Backend", op: Op, avals: Sequence[Aval], rank: int) -> Rule:
    """The parts of an op, one after the other on the stream of the whole."""
    step = definition(op, avals)
    found = step.avals()
    place = {put.name: k for k, put in enumerate(step.inputs)}
    rows = []
    for part in step.equations:
        rule = forming_rule(backend, part.op, [found[name] for name in part.operands], rank)
        take = _take([place[name] for name in part.operands])
        rows.append((rule, take, slice(len(place), len(place) + len(part.results))))
        place.update({name: len(place) + k for k, name in enumerate(part.results)})
    outputs = _take([place[name] for name in step.outputs])

    def whole(*operands: Any) -> Sequence[Any]:
        values = [*operands, *[None] * (len(place) - len(operands))]
        for function, take, put in rows:
            values[put] = function(*take(values))
        return tuple(outputs(values))

    return whole


def collective_of(
    backend: "Backend", op: Op, ranks: Sequence[int] | None = None, *, spent: bool = False, shared: bool = False
) -> Callable[..., list[Any]]:
    """An op that communicates as a function of every rank's operands, to every rank's results, both flat.

    `ranks` are those of whole groups, all that run here where it is None.  `spent`: nobody else ever sees the operands
    (`Program.spent`).  `shared`: ranks of a process share work, so what is `alike` on a group is given once for it.
    """
    rule, how, group, count = backend.table.rules[type(op)], op.communicates, op.group_of(), len(op.operands)
    assert isinstance(rule, Collective) and how is not None and group is not None
    if shared and rule.together is not None:
        return _met(bound(rule.together, **parameters(op)), count, group.size, once=op.alike)
    move, given = partial(backend.world.move, group=group.name, spent=spent), parameters(op)
    halves = [
        (bound(rule.send, run=run, **given), bound(rule.receive, run=run, **given))
        for run in (run_of(backend, op, rank) for rank in (backend.here if ranks is None else ranks))
    ]
    if len(halves) == 1:
        ((send, receive),) = halves
        return lambda *mine: receive(*move(how, (send(*mine),)), *mine)

    receiving = group.size if shared and op.alike else 1  # every how many ranks one receives

    def together(*flat: Any) -> list[Any]:
        operands = [flat[at : at + count] for at in range(0, len(flat), count)]
        sent = [send(*mine) for (send, _), mine in zip(halves, operands, strict=True)]
        results: list[Any] = []
        all_of_them = list(zip(move(how, sent), operands, halves, strict=True))
        for moved, mine, (_, receive) in all_of_them[::receiving]:
            results += receive(moved, *mine)
        return results

    return together


def _met(rule: Rule, count: int, size: int, *, once: bool) -> Callable[..., list[Any]]:
    """`Collective.together` for group after group of so many ranks; `once`: it gives one rank's results for all."""

    def together(*flat: Any) -> list[Any]:
        operands = [flat[at : at + count] for at in range(0, len(flat), count)]
        results: list[Any] = []
        for first in range(0, len(operands), size):
            given = rule(operands[first : first + size])
            results += given if once else [result for of_rank in given for result in of_rank]
        return results

    return together


def _side_by_side(rule: Rule, count: int) -> Callable[..., Sequence[Any]]:
    """`Table.together` of so many operands, as a function of every rank's operands, to every rank's results."""

    def together(*flat: Any) -> Sequence[Any]:
        results = rule(*[flat[at::count] for at in range(count)])
        return (
            results[0]
            if len(results) == 1
            else [result for of_rank in zip(*results, strict=True) for result in of_rank]
        )

    return together


def parameters(op: Op) -> dict[str, Any]:
    """The fields of an op, as its rules get them."""
    return {one.name: getattr(op, one.name) for one in attrs.fields(type(op))}


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
    tail: list[Any] = field(factory=list)
    loaded: int = 0
    current: str = MAIN  # the stream that the rows so far have made current
    by_form: dict[tuple[str, Form | None], list[int]] = field(factory=dict)
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
        found = {**self.place, **given, **self.outputs()}
        taken = tuple(found[name, rank] for name in self.program.outputs for rank in ranks)
        others = tuple(device.stream(name) for name in self.program.streams[1:]) if device.has_streams else ()
        if device.has_streams:
            device.module.synchronize()  # what parameters became in their forms may be read on any stream from here on
        rows, of, tail = tuple(self.rows), tuple(self.of), tuple(self.tail)
        return Body(rows, of, tail, taken, _take(taken), self.backend, others, self.avals, self.spent)

    def outputs(self) -> dict[tuple[str, int], int]:
        """Where copies lie of outputs that ranks share: who is given one may write it."""
        places: dict[tuple[str, int], int] = {}
        ours = {put.name for put in self.program.inputs}
        for name in dict.fromkeys(self.program.outputs) if self.shared else ():
            others = [rank for rank, first in zip(self.backend.here, self.shared[name], strict=True) if rank != first]
            if self.root[name] not in ours:
                for rank in others:
                    (place,) = self.results(1)
                    self.row(lambda x: (x.clone(),), [self.place[name, rank]], [place])
                    places[name, rank] = place
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
            self.takes[taken] = _take(taken)
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
        here, count = self.backend.here, len(launch.results)
        of = of_launch(launch, self.shared, self.own) if self.shared else self.own
        avals = [self.avals[name] for name in launch.operands]
        takes: dict[int, list[int]] = {}
        forms: dict[int, dict[int, Form]] = {}
        for rank in [rank for rank, first in zip(here, of, strict=True) if rank == here[first]]:
            operands = [self.operand(launch, position, name, rank) for position, name in enumerate(launch.operands)]
            takes[rank] = [place for place, _ in operands]
            forms[rank] = {position: form for position, (_, form) in enumerate(operands) if form is not None}
        together = self.backend.table.together.get(type(launch.op))
        if self.shared and together is not None and len(takes) > 1 and not any(forms.values()):
            places = self.results(count * len(takes))
            self.row(
                self.met(together, launch.op, tuple(takes)),
                [place for take in takes.values() for place in take],
                places,
                launch,
                None,
            )
        else:
            places = []
            for rank, take in takes.items():
                mine = self.results(count)
                self.row(self.rule(launch.op, avals, rank, forms[rank]), take, mine, launch, rank)
                places += mine
        at = {rank: number * count for number, rank in enumerate(takes)}
        for rank, first in zip(here, of, strict=True):
            mine = places[at[here[first]] :][:count]
            self.place.update({(name, rank): place for name, place in zip(launch.results, mine, strict=True)})

    def met(self, together: Rule, op: Op, ranks: tuple[int, ...]) -> Rule:
        """`Table.together` of an op for these ranks, the same for all launches that are alike."""
        if (op, ranks) not in self.rules:
            runs = [run_of(self.backend, op, rank) for rank in ranks]
            self.rules[op, ranks] = _side_by_side(bound(together, runs=runs, **parameters(op)), len(op.operands))
        return self.rules[op, ranks]

    def rule(self, op: Op, avals: Sequence[Aval], rank: int, forms: Mapping[int, Form]) -> Rule:
        """The rule of a local op on one rank, the same for all launches that are alike."""
        key = (op, tuple(avals), rank, tuple(forms.items()))
        if key not in self.rules:
            self.rules[key] = formed(rule_of(self.backend, op, avals, rank), forms)
        return self.rules[key]

    def operand(self, launch: Launch, position: int, name: str, rank: int) -> tuple[int, Form | None]:
        """Where an operand lies, and the form it must still be brought into: a parameter has been already."""
        form = self.backend.form(launch.op, position)
        if name not in self.parameters or self.prepared is None:
            return self.place[name, rank], form
        if takes_any(launch.op, position):
            form = self.prepared.kept.get(name)
        return self.parameter(name, form, rank), None

    def parameter(self, name: str, form: Form | None, rank: int) -> int:
        """Where a parameter lies in that form."""
        assert self.prepared is not None
        if (name, form) not in self.by_form:
            leaves = self.prepared.of(self.parameters[name], form)
            self.by_form[name, form] = [self.room(leaf) for leaf in leaves]
        return self.by_form[name, form][self.backend.here.index(rank)]

    def drop(self, drop: Drop) -> None:
        """Empty the places of all that lies in a value's memory behind the row before: any of them would hold it."""
        if not self.rows:
            self.row(lambda: (), ())
        names, ranks = self.lies[self.root[drop.value]], self.backend.here
        places = [self.place[name, rank] for name in names for rank in ranks if (name, rank) in self.place]
        *row, empty = self.rows[-1]
        self.rows[-1] = (*row, (*empty, *places))  # type: ignore[assignment]
        for room in (self.held.pop(place) for place in places if place in self.held):
            at, count, _ = room
            room[2] -= 1
            if not room[2]:
                self.free[count].append(at)

    def collective(self, launch: Launch) -> None:
        """One row for all ranks here."""
        ranks, count = self.backend.here, len(launch.results)
        take = [self.operand(launch, k, name, rank)[0] for rank in ranks for k, name in enumerate(launch.operands)]
        group = launch.op.group_of()
        assert group is not None
        each = group.size if self.shared and launch.op.alike else 1  # so many ranks share results
        places = self.results(count * len(ranks) // each)
        key = (launch.op, takes_over(launch, self.spent))
        if key not in self.rules:
            self.rules[key] = collective_of(self.backend, launch.op, spent=key[1], shared=bool(self.shared))
        self.row(self.rules[key], take, places, launch, None if len(ranks) > 1 else ranks[0])
        for number, rank in enumerate(ranks):
            mine = number // each * count
            self.place.update({(name, rank): places[mine + k] for k, name in enumerate(launch.results)})

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


def _take(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """What picks values out of a list, in C where there are any."""
    match list(places):
        case []:
            return lambda values: ()
        case [one]:
            return itemgetter(slice(one, one + 1))
    taken: Callable[[list[Any]], Sequence[Any]] = itemgetter(*places)
    return taken


def body_of(program: Program, backend: "Backend", prepared: Prepared | None) -> Body | Sharing:
    """What runs a program; raises `InputError` where the device has no stream left for it."""
    if not shares_work(backend):
        return Writer(program, backend, prepared).write()

    def write(unlike: frozenset[str]) -> Body:
        return Writer(program, backend, prepared, shared=sharers(program, backend, prepared, unlike)).write()

    return Sharing.of(program, backend, sharers(program, backend, prepared), write)
