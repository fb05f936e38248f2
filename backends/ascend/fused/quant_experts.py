"""Routed experts in 8 bits, from the tokens to the experts' rows, as one launch of three or four operators.

    rows, counts, source = permute_tokens(x, experts)
    rows = quant_grouped_linear(swiglu(quant_grouped_linear(rows, gate_up, ...)), down, ...)

Apart, rows are quantised for each product by themselves, and what is between
goes through memory in 16 bits.  Here the routing quantises, once for each
token, the first product gives its integer sums, and one operator makes of these
the activation in 8 bits, in float32 on the way; where weights are in FRACTAL_NZ
(`calls.fractal`), the same operator makes both.  The scales of the first weight
stay float32.  Those of the second are bf16, as the operator wants them beside
bf16, brought into it once, when the parameters are prepared.

Found for bf16, and widths that `npu_dequant_swiglu_quant` takes; those of the
operator for both are more.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from attrs import field, frozen

from mla_fx.backends.ascend.calls import grouped as call
from mla_fx.backends.ascend.calls.experts import (
    WIDEST,
    fits,
    product_swiglu_quantised,
    route,
    swiglu_quantised,
)
from mla_fx.backends.ascend.calls.fractal import fractal, is_fractal
from mla_fx.backends.ascend.calls.grouped import grouped
from mla_fx.backends.ascend.permute_tokens import takes as routes
from mla_fx.backends.device import Run
from mla_fx.backends.table import Fusion
from mla_fx.effects import Aval, Equation, Found, Group, Op, Step, Value, bind, ops, rewrite
from mla_fx.effects.aval import ShapeError
from mla_fx.effects.validate import instance, integer


@frozen
class QuantExperts(Op):
    """`x` [T, D], `experts` int32 [T, U], Y = `own` -> `rows` [T U, D], `source` int32 [T, U].

    `gate_up` int8 [Y, 2 F, D] with `gate_up_scale` [Y, 2 F] float32, `down` int8 [Y, D, F] with `down_scale` [Y, D].
    See `ops.PermuteTokens` and `ops.QuantGroupedLinear`.
    """

    own: int = field(validator=integer(1))
    group: Group = field(validator=instance(Group))
    operands: ClassVar = {
        "x": "T D",
        "experts": "T U int32",
        "gate_up": "Y E D int8",
        "gate_up_scale": "Y E wide",
        "down": "Y D F int8",
        "down_scale": "Y D wide",
    }
    results: ClassVar = ("rows", "source")

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Gate and up side by side, of this rank's experts."""
        for name, expected in (("Y", self.own), ("E", 2 * axes["F"])):
            if axes[name] != expected:
                raise ShapeError(f"{self.name}: axis {name} of gate_up must be {expected}: got {axes[name]}")
        pairs = (axes["T"], axes["U"])
        return Aval((axes["T"] * axes["U"], axes["D"]), dtype), Aval(pairs, "int32")

    def definition(self, *operands: Value) -> tuple[Value, ...]:
        """There, through both projections, and where the rows are from."""
        x, experts, gate_up, gate_up_scale, down, down_scale = operands
        rows, counts, source = bind(ops.PermuteTokens(self.own, self.group), x, experts)
        wide = bind(ops.QuantGroupedLinear(), rows, gate_up, gate_up_scale, counts)
        return (*bind(ops.QuantGroupedLinear(), *bind(ops.Swiglu(), *wide), down, down_scale, counts), source)


def takes(op: QuantExperts, x: Aval, experts: Aval, gate_up: Aval, scale: Aval, down: Aval, *rest: Aval) -> str | None:
    """bf16, experts and features that the operators take."""
    if x.dtype != "bf16":
        return f"x: 8-bit experts in one launch on ascend must be bf16: got {x.dtype}"
    if not fits(gate_up.shape[1]):
        return f"E: an 8-bit activation on ascend needs a multiple of 64 up to {WIDEST}: got {gate_up.shape[1]}"
    return call.takes(gate_up) or call.takes(down) or routes(ops.PermuteTokens(op.own, op.group), x, experts)


def narrowed(scale: torch.Tensor) -> torch.Tensor:
    """The form of the second weight's scales."""
    return scale.to(torch.bfloat16)


def rule(
    x: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    *,
    run: Run,
    own: int,
    group: Group,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows behind the last pair are unwritten all the way."""
    if not experts.numel():
        return x.new_empty((0, x.shape[1])), torch.empty_like(experts)
    mine = range(run.rank * own, (run.rank + 1) * own)
    rows, counts, source, steps = route(x, experts, own=mine, count=own * group.size, quantise=True)
    if is_fractal(gate_up):
        act, steps = product_swiglu_quantised(rows, gate_up, gate_up_scale, steps, counts)
    else:
        sums = grouped(rows, gate_up, counts, output_dtype=torch.int32)
        act, steps = swiglu_quantised(sums, gate_up_scale, steps, counts)
    out = grouped(act, down, counts, scale=[down_scale], per_token_scale=[steps], output_dtype=x.dtype)
    return out, source


def find(step: Step) -> Step:
    """The step with every such chain made one, where the operators take it."""
    made = {name: equation for equation in step.equations for name in equation.results}
    avals = step.avals()

    def maker(name: str, op: type[Op]) -> Equation | None:
        equation = made.get(name)
        return equation if equation is not None and isinstance(equation.op, op) else None

    def match(step: Step, last: Equation) -> Found | None:
        if not isinstance(last.op, ops.QuantGroupedLinear):
            return None
        act = maker(last.operands[0], ops.Swiglu)
        first = act and maker(act.operands[0], ops.QuantGroupedLinear)
        there = first and maker(first.operands[0], ops.PermuteTokens)
        if not (act and first and there) or {first.operands[3], last.operands[3]} != {there.results[1]}:
            return None
        if there.results[0] != first.operands[0]:
            return None
        assert isinstance(there.op, ops.PermuteTokens)
        op, operands = QuantExperts(there.op.own, there.op.group), (*there.operands, *first.operands[1:3])
        operands = (*operands, *last.operands[1:3])
        if takes(op, *(avals[name] for name in operands)):
            return None
        whole = Equation(op, operands, (*last.results, there.results[2]), last.tag)
        return Found((there, first, act, last), whole)

    return rewrite(step, match)


FUSION: Final = Fusion(
    QuantExperts, rule, takes, find, forms={"gate_up": fractal, "down": fractal, "down_scale": narrowed}
)
