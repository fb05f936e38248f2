"""Cosine and sine of the rotary angles, once a step for all layers.

    f[i]      = theta^(-2 i / R)                                   i < R / 2
    f_yarn[i] = f[i] / factor * ramp[i] + f[i] * (1 - ramp[i])     with YaRN
    cos[t, i] = m * cos(position[t] * f[i]),  sin[t, i] = m * sin(position[t] * f[i])
    cos[t, R / 2 + i] = cos[t, i],            sin[t, R / 2 + i] = sin[t, i]

Each stands there twice, as operators want it and Hugging Face has it.  The
frequencies are parameters, computed by `mla_fx.rope.frequencies`; `m` is the
ratio of the two YaRN mscales, 1 for DeepSeek-V3.  Positions are in 0..4194303,
twice 11 bits, so that a device without float64 may look an angle up in two
tables.  Angles are wide, or rounded to the dtype of the activations, as Hugging
Face, vLLM and the fused operators of Ascend have them: for a rotated feature
that is a rounding more.  Sources: RoFormer, YaRN.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from attrs import field, frozen
from attrs.validators import deep_iterable

from mla_fx.effects.aval import Aval, wide_dtype
from mla_fx.effects.op import Op
from mla_fx.effects.validate import InputError, boolean, instance, number, within

#: Positions that there are: 0..POSITIONS - 1.
POSITIONS: Final = 2048 * 2048


@frozen
class RopeAngles(Op):
    """`positions` int64 [T] in 0..4194303, `like` [J, D] -> `cos`, `sin` [T, R] in fp32, or fp64 beside float64.

    `like` is any activation of the step: only its dtype is looked at.  `rounded`: the angles have that dtype.
    """

    frequencies: tuple[float, ...] = field(validator=deep_iterable(number(least=0), instance(tuple)))
    magnitude: float = field(validator=number(above=0))
    rounded: bool = field(default=False, validator=boolean)
    operands: ClassVar = {"positions": "T int64", "like": "J D"}
    results: ClassVar = ("cos", "sin")

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Angles are wide beside `like`, or like it."""
        angles = Aval((axes["T"], 2 * len(self.frequencies)), dtype if self.rounded else wide_dtype(dtype))
        return angles, angles

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Every position is one that there is."""
        positions = values["positions"]
        if not within(positions, 0, POSITIONS):
            wrong = next(position for position in positions.tolist() if not 0 <= position < POSITIONS)
            raise InputError(f"positions: each must be in 0..{POSITIONS - 1}: got {wrong}")
