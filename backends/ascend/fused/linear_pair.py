"""Two products of the same activations as one launch: an op, its rule, and the pass that finds them.

    q_a, kv = linear(x, q_a_proj), linear(x, kv_a_proj)

are the low-rank query and the latent of a layer.  npu_grouped_matmul without
groups computes both in one call, from the weights as they lie, into results of
their own: a stacked weight would leave two strided halves of one result, which
the norms and rotations behind them copy.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar, Final

import torch
from attrs import evolve, frozen

from mla_fx.backends.ascend.calls.dtypes import wrong_dtype
from mla_fx.backends.device import Run
from mla_fx.backends.table import Fusion, Takes
from mla_fx.effects import Aval, Equation, Found, Op, Step, Value, bind, ops, rewrite
from mla_fx.effects.step import memory_of

_LIMIT = 65536


@frozen
class LinearPair(Op):
    """`x` [T, D], `first` [F, D], `second` [K, D] -> [T, F] and [T, K].  See `ops.Linear`."""

    operands: ClassVar = {"x": "T D", "first": "F D", "second": "K D"}
    results: ClassVar = ("first", "second")

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """One floating dtype; D must agree."""
        return Aval((axes["T"], axes["F"]), dtype), Aval((axes["T"], axes["K"]), dtype)

    def definition(self, *operands: Value) -> tuple[Value, ...]:
        """One after the other."""
        x, first, second = operands
        return (*bind(ops.Linear(), x, first), *bind(ops.Linear(), x, second))


def takes(op: LinearPair, x: Aval, first: Aval, second: Aval) -> str | None:
    """Features that the operator takes."""
    if why := wrong_dtype("x", x):
        return why
    sizes = (x.shape[1], first.shape[0], second.shape[0])
    if not all(1 <= size < _LIMIT for size in sizes):
        return f"D, F and K: a pair of projections on ascend needs 1 to {_LIMIT - 1} features: got {sizes}"
    return None


def rule(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as transposed views, `x` for each."""
    if not x.shape[0]:
        return x.new_empty((0, first.shape[0])), x.new_empty((0, second.shape[0]))
    x, weights = x.contiguous(), [weight.contiguous().t() for weight in (first, second)]
    one, two = torch.ops.npu.npu_grouped_matmul([x, x], weights, split_item=0, group_type=-1)
    return one, two


def find(step: Step) -> Step:
    """The step with every two products of the same input as one, where the first of them was."""
    return find_pairs(step, ops.Linear, LinearPair(), takes)


def find_pairs(step: Step, one: type[Op], pair: Op, takes: Takes) -> Step:
    """The step with every two launches of `one`, whose first operand is the same, as `pair`, where the first was.

    The second is brought forward to it: so what else it takes must be parameters, and nothing may write what both take.
    """
    avals = step.avals()
    given = {put.name for put in step.inputs if put.role == "parameter"}
    root = memory_of((put.name for put in step.inputs), step.equations)
    written = {root[e.operands[position]] for e in step.equations for position in e.op.written()}
    waiting: dict[str, Equation] = {}  # input -> a product of it that has no other yet
    after: dict[tuple[str, ...], Equation] = {}  # results of a product -> the one to bring behind it
    for equation in step.equations:
        x, *others = equation.operands
        if not isinstance(equation.op, one) or not given.issuperset(others):
            continue
        if root[x] in written:
            continue
        first = waiting.pop(x, None)
        if first is None:
            waiting[x] = equation
        elif takes(pair, *(avals[name] for name in (*first.operands, *others))) is None:
            after[first.results] = equation
    if not after:
        return step
    moved = {equation.results for equation in after.values()}
    order: list[Equation] = []
    for equation in step.equations:
        if equation.results not in moved:
            order.append(equation)
        if equation.results in after:
            order.append(after[equation.results])
    before = {equation.results: first for first, equation in pairwise(order)}

    def match(step: Step, equation: Equation) -> Found | None:
        if equation.results not in moved:
            return None
        first = before[equation.results]
        operands = (*first.operands, *equation.operands[1:])
        return Found((first, equation), Equation(pair, operands, first.results + equation.results, first.tag))

    return rewrite(evolve(step, equations=tuple(order)), match)


FUSION: Final = Fusion(LinearPair, rule, takes, find)
