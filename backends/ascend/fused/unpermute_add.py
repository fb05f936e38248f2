"""The experts' rows back at their tokens, and what else belongs to the sum added, as one operator.

    out = add(unpermute_tokens(rows, source, weights), other)

`other` is what the shared experts give.  Fused, it goes through
npu_moe_finalize_routing with the rows, and the sum is rounded once instead of twice.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from attrs import frozen

from mla_fx.backends.ascend.calls.dtypes import wrong_dtype
from mla_fx.backends.ascend.calls.experts import finalise
from mla_fx.backends.device import Run
from mla_fx.backends.table import Fusion
from mla_fx.effects import Aval, Equation, Found, Op, Step, Value, bind, ops, rewrite


@frozen
class UnpermuteAdd(Op):
    """`rows` [T U, D], `source` int32 [T, U], `weights` [T, U] float32, `other` [T, D] -> [T, D]."""

    operands: ClassVar = {**ops.UnpermuteTokens.operands, "other": "T D"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """As without `other`."""
        return ops.UnpermuteTokens().shape_rule(axes, dtype)

    def definition(self, *operands: Value) -> tuple[Value, ...]:
        """The rows first, then the other part."""
        *given, other = operands
        return bind(ops.Add(), *bind(ops.UnpermuteTokens(), *given), other)


def takes(op: UnpermuteAdd, rows: Aval, *others: Aval) -> str | None:
    """Rows in a dtype that the operator takes."""
    return wrong_dtype("rows", rows)


def rule(
    rows: torch.Tensor, source: torch.Tensor, weights: torch.Tensor, other: torch.Tensor, *, run: Run
) -> tuple[torch.Tensor]:
    """One sum in float32."""
    return (finalise(rows, source, weights, other=other),)


def find(step: Step) -> Step:
    """The step with every sum of unpermuted rows and something else made one with the unpermuting."""
    made = {name: equation for equation in step.equations for name in equation.results}

    def match(step: Step, equation: Equation) -> Found | None:
        if not isinstance(equation.op, ops.Add):
            return None
        for name, other in (equation.operands, equation.operands[::-1]):
            routed = made.get(name)
            if routed is not None and isinstance(routed.op, ops.UnpermuteTokens) and name != other:
                operands = (*routed.operands, other)
                whole = Equation(UnpermuteAdd(), operands, equation.results, equation.tag)
                return Found((routed, equation), whole)
        return None

    return rewrite(step, match)


FUSION: Final = Fusion(UnpermuteAdd, rule, takes, find)
