"""Rules of a backend as functions of operands alone, for the rows of a program: where they run and fields are given."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any

import attrs

from mla_fx.backends.device import Run
from mla_fx.backends.table import Collective, Rule, formed
from mla_fx.effects import Aval, Op
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
        take = take_from([place[name] for name in part.operands])
        rows.append((rule, take, slice(len(place), len(place) + len(part.results))))
        place.update({name: len(place) + k for k, name in enumerate(part.results)})
    outputs = take_from([place[name] for name in step.outputs])

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
    move, given = partial(backend.world.move, group=group.name, spent=spent), parameters(op)
    halves = [
        (bound(rule.send, run=run, **given), bound(rule.receive, run=run, **given))
        for run in (run_of(backend, op, rank) for rank in (backend.here if ranks is None else ranks))
    ]
    if len(halves) == 1:
        ((send, receive),) = halves
        return lambda *mine: receive(*move(how, (send(*mine),)), *mine)

    receiving = group.size if shared and op.alike else 1  # every how many ranks one receives

    def moved(*flat: Any) -> list[Any]:
        operands = [flat[at : at + count] for at in range(0, len(flat), count)]
        sent = [send(*mine) for (send, _), mine in zip(halves, operands, strict=True)]
        results: list[Any] = []
        all_of_them = list(zip(move(how, sent), operands, halves, strict=True))
        for brought, mine, (_, receive) in all_of_them[::receiving]:
            results += receive(brought, *mine)
        return results

    return moved


def met(rule: Collective, op: Op) -> Callable[..., Sequence[Any]]:
    """`Collective.together` of all ranks here, group after group; what is `alike` comes once for each group."""
    group, together = op.group_of(), rule.together
    assert group is not None and together is not None
    size, whole = group.size, bound(together, **parameters(op))

    def groups(*operands: Sequence[Any]) -> Sequence[Any]:
        if len(operands[0]) == size:
            results: Sequence[Any] = whole(*operands)
            return results
        firsts = range(0, len(operands[0]), size)
        given = [whole(*[of[first : first + size] for of in operands]) for first in firsts]
        if op.alike:
            return [result for of_group in given for result in of_group]
        return [[one for of_group in result for one in of_group] for result in zip(*given, strict=True)]

    return groups


def parameters(op: Op) -> dict[str, Any]:
    """The fields of an op, as its rules get them."""
    return {one.name: getattr(op, one.name) for one in attrs.fields(type(op))}


def take_from(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """What picks values out of a list, in C where there are any."""
    match list(places):
        case []:
            return lambda values: ()
        case [one]:
            return itemgetter(slice(one, one + 1))
    taken: Callable[[list[Any]], Sequence[Any]] = itemgetter(*places)
    return taken
