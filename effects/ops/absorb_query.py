"""Fold W_UK into the query, so that attention runs in the latent.

    q_latent[t, n, l] = sum_p q[t, n, p] * w_uk[n, p, l]        p < P

Since k_nope[j, n] = w_uk[n] @ c[j], the score q_nope . k_nope equals
q_latent . c: keys need not be expanded per head.  `q` is the query projection,
per head P features without and R with position; only the first P are read.
Source: DeepSeek-V2 paper, section 2.1.2 (weight absorption).
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.op import Op
from mla_fx.effects.validate import integer


@frozen
class AbsorbQuery(Op):
    """`q` [T, N * Q], `w_uk` [N, P, L] -> [T, N, L].  `rope` is R, the features of a head that carry position."""

    rope: int = field(validator=integer(0))
    operands: ClassVar = {"q": "T D", "w_uk": "N P L"}
    results: ClassVar = ("q_latent",)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """`q` must hold N heads of P + R features."""
        heads, nope = axes["N"], axes["P"]
        if axes["D"] != heads * (nope + self.rope):
            raise ShapeError(
                f"{self.name}: axis 1 of q must be N * (P + R) = {heads} * ({nope} + {self.rope}) = "
                f"{heads * (nope + self.rope)}: got {axes['D']}"
            )
        return (Aval((axes["T"], heads, axes["L"]), dtype),)

    def work(self, axes: Mapping[str, int], lengths: Mapping[str, Sequence[int]]) -> int:
        """A product for each token and head."""
        return axes["T"] * axes["N"] * axes["P"] * axes["L"]
