"""The residual and the norm of it as one operator: an op, its rule, and the pass that finds them.

    h = add(hidden, part)
    x = rms_norm(h, weight)

npu_add_rms_norm gives both.  It takes the norm of the sum as that is rounded,
which is what the parts do one after the other.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from attrs import field, frozen

from mla_fx.backends.ascend.calls.dtypes import wrong_dtype
from mla_fx.backends.device import Run
from mla_fx.backends.table import Fusion
from mla_fx.effects import Aval, Equation, Found, Op, Step, Value, bind, ops, rewrite
from mla_fx.effects.validate import number


@frozen
class AddRmsNorm(Op):
    """`x` [T, D], `y` [T, D], `weight` [D] -> their sum and its norm, both [T, D].  See `ops.Add`, `ops.RmsNorm`."""

    epsilon: float = field(validator=number(least=0))
    operands: ClassVar = {"x": "T D", "y": "T D", "weight": "D"}
    results: ClassVar = ("h", "normed")

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """No broadcasting, one dtype."""
        return (Aval((axes["T"], axes["D"]), dtype),) * 2

    def definition(self, *operands: Value) -> tuple[Value, ...]:
        """The sum, then its norm."""
        x, y, weight = operands
        (h,) = bind(ops.Add(), x, y)
        return (h, *bind(ops.RmsNorm(self.epsilon), h, weight))


def takes(op: AddRmsNorm, x: Aval, y: Aval, weight: Aval) -> str | None:
    """Dtypes that the operator takes."""
    return wrong_dtype("x", x)


def rule(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, *, run: Run, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One call.  Epsilon is passed: the operator's default is its own."""
    if not x.shape[0]:
        return x.new_empty(x.shape), x.new_empty(x.shape)
    normed, _, h = torch.ops.npu.npu_add_rms_norm(x, y, weight, epsilon)
    return h, normed


def find(step: Step) -> Step:
    """The step with every sum whose norm follows, of all its features, as one."""
    avals = step.avals()
    maker = {name: equation for equation in step.equations for name in equation.results}

    def match(step: Step, equation: Equation) -> Found | None:
        if not isinstance(equation.op, ops.RmsNorm):
            return None
        total, weight = equation.operands
        addition = maker.get(total)
        if addition is None or not isinstance(addition.op, ops.Add) or avals[weight].shape != avals[total].shape[1:]:
            return None
        op = AddRmsNorm(equation.op.epsilon)
        operands = (*addition.operands, weight)
        if takes(op, *(avals[name] for name in operands)) is not None:
            return None
        return Found((addition, equation), Equation(op, operands, addition.results + equation.results, equation.tag))

    return rewrite(step, match)


FUSION: Final = Fusion(AddRmsNorm, rule, takes, find)
