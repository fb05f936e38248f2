"""Root-mean-square norm of the first features of a row.

    out[t, d] = x[t, d] / sqrt(mean_d x[t, d]^2 + epsilon) * weight[d]        d < len(weight)

The latent projection is 512 + 64 wide and only the first 512 are normalised,
so `x` may be wider than `weight`; the rest is not read.  Source: RMSNorm as in
DeepSeek-V3 (`kv_a_layernorm` on the latent, `q_a_layernorm`, `input_layernorm`).
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.op import Op
from mla_fx.effects.validate import number


@frozen
class RmsNorm(Op):
    """`x` [T, D], `weight` [F] with F <= D -> [T, F]."""

    epsilon: float = field(validator=number(least=0))
    operands: ClassVar = {"x": "T D", "weight": "F"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """The weight is at most as wide as the row."""
        if axes["F"] > axes["D"]:
            raise ShapeError(
                f"{self.name}: axis F of weight must be at most axis D of x: got {axes['F']} in weight, "
                f"{axes['D']} in x"
            )
        return (Aval((axes["T"], axes["F"]), dtype),)
