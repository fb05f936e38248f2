"""Rotate the last R features of every head by the token's angles.

    a[i] = x[t, h, -R + 2 i],   b[i] = x[t, h, -R + 2 i + 1]        i < R / 2
    out[t, h, i]         = a[i] * cos[t, i] - b[i] * sin[t, i]
    out[t, h, R / 2 + i] = b[i] * cos[t, R / 2 + i] + a[i] * sin[t, R / 2 + i]

Pairs lie interleaved in the projection and leave de-interleaved, as in Hugging
Face and in the Ascend operators (the DeepSeek reference leaves them in place:
same scores, other order in the cache).  The angles are wide or in the dtype of
`x`; the computation is wide, float32 (float64 beside float64), the result in
the dtype of `x`.
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen
from attrs.validators import optional

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.op import Op
from mla_fx.effects.validate import integer


@frozen
class Rope(Op):
    """`x` [T, heads * D], `cos`, `sin` [T, R] -> [T, heads, R], or [T, R] when `heads` is None.

    `heads` splits the features of `x` into heads; None rotates the end of the
    one row of a token (the key, shared by all heads).
    """

    heads: int | None = field(validator=optional(integer(1)))
    operands: ClassVar = {"x": "T D", "cos": "T R either", "sin": "T R either"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """R is even, and a head at least that wide."""
        heads, rope = self.heads or 1, axes["R"]
        if rope % 2:
            raise ShapeError(f"{self.name}: axis R of cos must be even: got {rope}")
        if axes["D"] % heads or axes["D"] // heads < rope:
            raise ShapeError(
                f"{self.name}: axis 1 of x must be {heads} heads of at least R = {rope} features: got {axes['D']}"
            )
        middle = () if self.heads is None else (heads,)
        return (Aval((axes["T"], *middle, rope), dtype),)
