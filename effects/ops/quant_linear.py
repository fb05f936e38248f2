"""Project features with an 8-bit weight: W8A8 dynamic.

    s[t]      = max_d |x[t, d]| / 127                       of each token, in float32
    q[t, d]   = round(x[t, d] / s[t])                       to even; 0 where s[t] is 0
    out[t, f] = s[t] * scale[f] * sum_d q[t, d] * weight[f, d]

The sum is of integers and exact.  Activations are quantised per token as they
come, weights per output channel ahead of time, both symmetric.  Source:
dynamic W8A8 as in `npu_dynamic_quant` and `npu_quant_matmul`.
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import FLOATS, Aval, match, require_dtype, wide_dtype
from mla_fx.effects.op import Op


@frozen
class QuantLinear(Op):
    """`x` [T, D], `weight` int8 [F, D], `scale` [F] float32 (float64 beside float64) -> [T, F] like `x`."""

    operands: ClassVar = ("x", "weight", "scale")

    def shape_rule(self, x: Aval, weight: Aval, scale: Aval) -> tuple[Aval, ...]:
        """One scale for each output feature."""
        axes = match(self.name, x=(x, "T D"), weight=(weight, "F D"), scale=(scale, "F"))
        require_dtype(self.name, "x", x, *FLOATS)
        require_dtype(self.name, "weight", weight, "int8")
        require_dtype(self.name, "scale", scale, wide_dtype(x.dtype))
        return (Aval((axes["T"], axes["F"]), x.dtype),)
