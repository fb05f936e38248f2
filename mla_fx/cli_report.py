"""`mla-fx decode --report`: what was really moved and held, rank by rank, beside what the formulas say."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from attrs import frozen

from mla_fx.backends.meter import Metered, Tally
from mla_fx.models import Runner
from mla_fx.models.plan import Plan
from mla_fx.models.stack import layer_of


@frozen
class Rank:
    """Bytes of one rank: `moved` by layer, collective and group, in the order of a step; the rest is what it holds.

    `forms` is what parameters became in the forms that rules want, beside themselves; `values` the most at once in a
    step, and `values_priced` what the programs' cost says of that.
    """

    number: int
    moved: dict[tuple[int | None, str, str], Tally]
    weights: int
    forms: int
    cache: int
    values: int
    values_priced: int
    workspace: int


def measured(runner: Runner, metered: Metered) -> list[Rank]:
    """Of every rank.  A collective: every process of a group must call it."""
    told = metered.share([_rank(runner, metered, rank) for rank in metered.here])
    return sorted({rank.number: rank for here in told for rank in here}.values(), key=lambda rank: rank.number)


def _rank(runner: Runner, metered: Metered, rank: int) -> Rank:
    meter, at = metered.meter, metered.here.index(rank)
    moved: dict[tuple[int | None, str, str], Tally] = {}
    for place, tally in meter.moved.items():
        if place.rank == rank:
            total = moved.setdefault((layer_of(place.tag), place.op, place.group), Tally())
            total.add(tally)
    weights, forms = runner.params.held(rank)
    scratch = metered.device.scratch
    return Rank(
        number=rank,
        moved=moved,
        weights=weights,
        forms=forms,
        cache=sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(runner.caches[at])),
        values=meter.values[rank],
        values_priced=meter.values_priced,
        workspace=sum(one.memory.nbytes for (of, _), one in scratch.items() if of == rank and one.memory is not None),
    )


def lines(ranks: Iterable[Rank], plan: Plan) -> Iterator[str]:
    """All of it in words; what differs from formula or plan says so."""
    ranks = list(ranks)
    yield "moved, over all steps: messages to the transport, and bytes sent to other ranks"
    for alike, first in _alike(ranks, lambda rank: _text(rank.moved)):
        for line in _text(first.moved):
            yield f"  {alike}, {line}"
    yield "held, in bytes"
    for alike, first in _alike(ranks, lambda rank: list(_held(rank, plan))):
        for line in _held(first, plan):
            yield f"  {alike}, {line}"


def _alike(ranks: list[Rank], key: Any) -> Iterator[tuple[str, Rank]]:
    """Ranks in a row of which the same is to be said, and the first of them."""
    for _, run in groupby(ranks, key):
        each = list(run)
        last = f" to {each[-1].number}" if len(each) > 1 else ""
        yield f"{'each of ranks' if last else 'rank'} {each[0].number}{last}", each[0]


def _text(moved: dict[tuple[int | None, str, str], Tally]) -> list[str]:
    """A line for each layer and collective, and one for layers in a row that send alike."""
    by_layer: dict[int | None, list[str]] = {}
    for (layer, op, group), tally in moved.items():
        by_layer.setdefault(layer, []).append(f"{op} over {group}: {tally}")
    found = []
    for said, run in groupby(by_layer.items(), lambda item: item[1]):
        layers = [layer for layer, _ in run]
        several = len(layers) > 1
        where = f"each of layers.{layers[0]} to layers.{layers[-1]}" if several else f"layers.{layers[0]}"
        found += [f"{'outside of layers' if layers == [None] else where}, {line}" for line in said]
    return found


def _held(rank: Rank, plan: Plan) -> Iterator[str]:
    yield f"weights: {rank.weights:,}{_beside(rank.weights, sum(plan.weights.values()), 'planned')}"
    if rank.forms:
        yield f"weights once more, in the form that an operator wants: {rank.forms:,}"
    yield f"cache: {rank.cache:,}{_beside(rank.cache, plan.cache, 'planned')}"
    yield f"values of a step at most: {rank.values:,}{_beside(rank.values, rank.values_priced, 'priced')}"
    yield f"workspace: {rank.workspace:,}, which the operators ask for"


def _beside(found: int, said: int, word: str) -> str:
    return f", as {word}" if found == said else f", where {said:,} are {word}"
