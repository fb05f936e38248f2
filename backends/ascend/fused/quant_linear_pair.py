"""Two products in 8 bits of the same activations as one launch of three operators: `x` is quantised once.

    q_a, kv = quant_linear(x, q_a_proj, ...), quant_linear(x, kv_a_proj, ...)

are the low-rank query and the latent of a layer.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from attrs import frozen

from mla_fx.backends.ascend.calls.fractal import fractal, matrix
from mla_fx.backends.ascend.fused.linear_pair import find_pairs
from mla_fx.backends.ascend.quant_linear import takes as projects
from mla_fx.backends.device import Run
from mla_fx.backends.table import Fusion
from mla_fx.effects import Aval, Op, Step, Value, bind, ops


@frozen
class QuantLinearPair(Op):
    """`x` [T, D] -> [T, F] and [T, K]; weights int8 [F, D] and [K, D] with scales [F] and [K] float32.

    See `ops.QuantLinear`.
    """

    operands: ClassVar = {
        "x": "T D",
        "first": "F D int8",
        "first_scale": "F wide",
        "second": "K D int8",
        "second_scale": "K wide",
    }
    results: ClassVar = ("first", "second")

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """One floating dtype; D must agree."""
        return Aval((axes["T"], axes["F"]), dtype), Aval((axes["T"], axes["K"]), dtype)

    def definition(self, *operands: Value) -> tuple[Value, ...]:
        """One after the other."""
        x, *others = operands
        return (*bind(ops.QuantLinear(), x, *others[:2]), *bind(ops.QuantLinear(), x, *others[2:]))


def takes(op: QuantLinearPair, x: Aval, *others: Aval) -> str | None:
    """bf16 and fp16, and features that the operators take."""
    if x.dtype not in ("bf16", "fp16"):
        return f"x: a pair of 8-bit projections on ascend must be bf16 or fp16: got {x.dtype}"
    linear = ops.QuantLinear()
    return projects(linear, x, *others[:2]) or projects(linear, x, *others[2:])


def rule(
    x: torch.Tensor,
    first: torch.Tensor,
    first_scale: torch.Tensor,
    second: torch.Tensor,
    second_scale: torch.Tensor,
    *,
    run: Run,
) -> tuple[torch.Tensor, ...]:
    """Steps for every token, then a product for each weight."""
    weights = ((first, first_scale), (second, second_scale))
    if not x.shape[0]:
        return tuple(x.new_empty((0, weight.shape[0])) for weight, _ in weights)
    q, step = torch.ops.npu.npu_dynamic_quant(x)
    return tuple(
        torch.ops.npu.npu_quant_matmul(
            q, matrix(weight), scale=scale.contiguous(), pertoken_scale=step, output_dtype=x.dtype
        )
        for weight, scale in weights
    )


def find(step: Step) -> Step:
    """The step with every two products in 8 bits of the same input as one, where the first of them was."""
    return find_pairs(step, ops.QuantLinear, QuantLinearPair(), takes)


FUSION: Final = Fusion(QuantLinearPair, rule, takes, find, forms={"first": fractal, "second": fractal})
