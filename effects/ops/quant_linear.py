"""Project features with an 8-bit weight: W8A8 dynamic.

    s[t]      = max_d |x[t, d]| / 127                       of each token, in float32
    q[t, d]   = round(x[t, d] / s[t])                       to even; 0 where s[t] is 0
    out[t, f] = s[t] * scale[f] * sum_d q[t, d] * weight[f, d]

The sum is of integers and exact.  Activations are quantised per token as they
come, weights per output channel ahead of time, both symmetric.  Source:
dynamic W8A8 as in `npu_dynamic_quant` and `npu_quant_matmul`.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.op import Op


@frozen
class QuantLinear(Op):
    """`x` [T, D], `weight` int8 [F, D], `scale` [F] float32 (float64 beside float64) -> [T, F] like `x`."""

    operands: ClassVar = {"x": "T D", "weight": "F D int8", "scale": "F wide"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """One scale for each output feature."""
        return (Aval((axes["T"], axes["F"]), dtype),)

    def work(self, axes: Mapping[str, int], lengths: Mapping[str, Sequence[int]]) -> int:
        """As many as in floats."""
        return axes["T"] * axes["D"] * axes["F"]
