"""A feed-forward network in 8 bits as one launch of four operators: a dense one, or the shared experts.

    out = quant_linear(swiglu(quant_linear(x, gate_up, ...)), down, ...)

Apart, what comes of the first product is rounded to 16 bits, and again behind
the activation, before it is quantised.  Here the first product gives its
integer sums, and npu_dequant_swiglu_quant makes of these the activation in 8
bits, in float32 on the way.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from attrs import frozen

from mla_fx.backends.ascend.calls import fractal
from mla_fx.backends.ascend.calls.experts import WIDEST, fits, swiglu_quantised
from mla_fx.backends.ascend.quant_linear import takes as projects
from mla_fx.backends.device import Run
from mla_fx.backends.table import Fusion
from mla_fx.effects import Aval, Equation, Found, Op, Step, Value, bind, ops, rewrite
from mla_fx.effects.aval import ShapeError


@frozen
class QuantMlp(Op):
    """`x` [T, D] -> [T, K]; `gate_up` int8 [2 F, D] with `gate_up_scale` [2 F] float32, `down` int8 [K, F] with [K]."""

    operands: ClassVar = {
        "x": "T D",
        "gate_up": "E D int8",
        "gate_up_scale": "E wide",
        "down": "K F int8",
        "down_scale": "K wide",
    }

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Gate and up side by side."""
        if axes["E"] != 2 * axes["F"]:
            raise ShapeError(f"{self.name}: axis E of gate_up must be {2 * axes['F']}, twice F: got {axes['E']}")
        return (Aval((axes["T"], axes["K"]), dtype),)

    def definition(self, *operands: Value) -> tuple[Value, ...]:
        """A product, the activation, a product."""
        x, gate_up, gate_up_scale, down, down_scale = operands
        wide = bind(ops.QuantLinear(), x, gate_up, gate_up_scale)
        return bind(ops.QuantLinear(), *bind(ops.Swiglu(), *wide), down, down_scale)


def takes(op: QuantMlp, x: Aval, gate_up: Aval, gate_up_scale: Aval, down: Aval, down_scale: Aval) -> str | None:
    """bf16 and fp16, and features that the operators take."""
    if x.dtype not in ("bf16", "fp16"):
        return f"x: an 8-bit network in one launch on ascend must be bf16 or fp16: got {x.dtype}"
    if not fits(gate_up.shape[0]):
        return f"E: an 8-bit activation on ascend needs a multiple of 64 up to {WIDEST}: got {gate_up.shape[0]}"
    act, linear = Aval((x.shape[0], down.shape[1]), x.dtype), ops.QuantLinear()
    return projects(linear, x, gate_up, gate_up_scale) or projects(linear, act, down, down_scale)


def rule(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    *,
    run: Run,
) -> tuple[torch.Tensor]:
    """Weights as transposed views."""
    if not x.shape[0]:
        return (x.new_empty((0, down.shape[0])),)
    q, steps = torch.ops.npu.npu_dynamic_quant(x)
    gate_up_scale = gate_up_scale.contiguous()
    sums = torch.ops.npu.npu_quant_matmul(q, fractal.matrix(gate_up), gate_up_scale, output_dtype=torch.int32)
    act, steps = swiglu_quantised(sums, gate_up_scale, steps)
    scales = {"scale": down_scale.contiguous(), "pertoken_scale": steps}
    return (torch.ops.npu.npu_quant_matmul(act, fractal.matrix(down), **scales, output_dtype=x.dtype),)


def find(step: Step) -> Step:
    """The step with every such network as one, where the operators take it."""
    made = {name: equation for equation in step.equations for name in equation.results}
    avals = step.avals()

    def match(step: Step, last: Equation) -> Found | None:
        act = made.get(last.operands[0]) if isinstance(last.op, ops.QuantLinear) else None
        first = made.get(act.operands[0]) if act is not None and isinstance(act.op, ops.Swiglu) else None
        if act is None or first is None or not isinstance(first.op, ops.QuantLinear):
            return None
        operands = (*first.operands, *last.operands[1:])
        if takes(QuantMlp(), *(avals[name] for name in operands)):
            return None
        return Found((first, act, last), Equation(QuantMlp(), operands, last.results, last.tag))

    return rewrite(step, match)


FUSION: Final = Fusion(QuantMlp, rule, takes, find, forms={"gate_up": fractal.fractal, "down": fractal.fractal})
