"""Root-mean-square norm of the first features of a row.

    out[t, d] = x[t, d] / sqrt(mean_d x[t, d]^2 + epsilon) * weight[d]        d < len(weight)

The latent projection is 512 + 64 wide and only the first 512 are normalised,
so `x` may be wider than `weight`; the rest is not read.  Source: RMSNorm as in
DeepSeek-V3 (`kv_a_layernorm` on the latent, `q_a_layernorm`, `input_layernorm`).
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, ShapeError, match, same_dtype
from mla_fx.effects.op import Op


@frozen
class RmsNorm(Op):
    """`x` [T, D], `weight` [F] with F <= D -> [T, F]."""

    epsilon: float
    operands: ClassVar = ("x", "weight")

    def shape_rule(self, x: Aval, weight: Aval) -> tuple[Aval, ...]:
        """One floating dtype; the weight is at most as wide as the row."""
        axes = match(self.name, x=(x, "T D"), weight=(weight, "F"))
        if axes["F"] > axes["D"]:
            raise ShapeError(
                f"{self.name}: axis F of weight must be at most axis D of x: got {axes['F']} in weight, "
                f"{axes['D']} in x"
            )
        return (Aval((axes["T"], axes["F"]), same_dtype(self.name, x=x, weight=weight)),)
