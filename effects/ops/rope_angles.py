"""Cosine and sine of the rotary angles, once a step for all layers.

    f[i]      = theta^(-2 i / R)                                   i < R / 2
    f_yarn[i] = f[i] / factor * ramp[i] + f[i] * (1 - ramp[i])     with YaRN
    cos[t, i] = m * cos(position[t] * f[i]),  sin[t, i] = m * sin(position[t] * f[i])

The frequencies are parameters, computed by `mla_fx.rope.frequencies`; `m` is
the ratio of the two YaRN mscales, 1 for DeepSeek-V3.  Sources: RoFormer, YaRN.
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, match, require_dtype
from mla_fx.effects.op import Op


@frozen
class RopeAngles(Op):
    """`positions` int64 [T], `like` [T, D] -> `cos`, `sin` [T, R / 2] in fp32, or fp64 beside float64.

    `like` is any activation of the step: only its dtype is looked at.
    """

    frequencies: tuple[float, ...]
    magnitude: float
    operands: ClassVar = ("positions", "like")
    results: ClassVar = ("cos", "sin")

    def shape_rule(self, positions: Aval, like: Aval) -> tuple[Aval, ...]:
        """`like` is any activation [T, D]; only its dtype counts."""
        axes = match(self.name, positions=(positions, "T"), like=(like, "T D"))
        require_dtype(self.name, "positions", positions, "int64")
        angles = Aval((axes["T"], len(self.frequencies)), "fp64" if like.dtype == "fp64" else "fp32")
        return angles, angles
