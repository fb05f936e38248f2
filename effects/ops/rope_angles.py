"""Cosine and sine of the rotary angles, once a step for all layers.

    f[i]      = theta^(-2 i / R)                                   i < R / 2
    f_yarn[i] = f[i] / factor * ramp[i] + f[i] * (1 - ramp[i])     with YaRN
    cos[t, i] = m * cos(position[t] * f[i]),  sin[t, i] = m * sin(position[t] * f[i])

The frequencies are parameters, computed by `mla_fx.rope.frequencies`; `m` is
the ratio of the two YaRN mscales, 1 for DeepSeek-V3.  Sources: RoFormer, YaRN.
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen
from attrs.validators import deep_iterable

from mla_fx.effects.aval import Aval, wide_dtype
from mla_fx.effects.op import Op
from mla_fx.effects.validate import instance, number


@frozen
class RopeAngles(Op):
    """`positions` int64 [T], `like` [T, D] -> `cos`, `sin` [T, R / 2] in fp32, or fp64 beside float64.

    `like` is any activation of the step: only its dtype is looked at.
    """

    frequencies: tuple[float, ...] = field(validator=deep_iterable(number(least=0), instance(tuple)))
    magnitude: float = field(validator=number(above=0))
    operands: ClassVar = {"positions": "T int64", "like": "T D"}
    results: ClassVar = ("cos", "sin")

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Angles are wide beside `like`."""
        angles = Aval((axes["T"], len(self.frequencies)), wide_dtype(dtype))
        return angles, angles
