"""Fold W_UK into the query, so that attention runs in the latent.

    q_latent[t, n, l] = sum_p q[t, n, p] * w_uk[n, p, l]        p < P

Since k_nope[j, n] = w_uk[n] @ c[j], the score q_nope . k_nope equals
q_latent . c: keys need not be expanded per head.  `q` is the query projection,
per head P features without and R with position; only the first P are read.
Source: DeepSeek-V2 paper, section 2.1.2 (weight absorption).
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, ShapeError, match, same_dtype
from mla_fx.effects.op import Op


@frozen
class AbsorbQuery(Op):
    """`q` [T, N * Q], `w_uk` [N, P, L] -> [T, N, L].  `rope` is R, the features of a head that carry position."""

    rope: int
    operands: ClassVar = ("q", "w_uk")
    results: ClassVar = ("q_latent",)

    def shape_rule(self, q: Aval, w_uk: Aval) -> tuple[Aval, ...]:
        """`q` must hold N heads of P + R features."""
        axes = match(self.name, q=(q, "T D"), w_uk=(w_uk, "N P L"))
        heads, nope = axes["N"], axes["P"]
        if axes["D"] != heads * (nope + self.rope):
            raise ShapeError(
                f"{self.name}: axis 1 of q must be N * (P + R) = {heads} * ({nope} + {self.rope}) = "
                f"{heads * (nope + self.rope)}: got {axes['D']}"
            )
        return (Aval((axes["T"], heads, axes["L"]), same_dtype(self.name, q=q, w_uk=w_uk)),)
