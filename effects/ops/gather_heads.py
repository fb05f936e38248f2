"""All-gather the queries of the group's heads, in rank order.

    q_latent_all[t, r * N + n] = q_latent of rank r [t, n];  the same for q_rope

One message of L + R features a head.  Source: the DCP query gather of vLLM
(all-gather on the head axis).
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, ShapeError, match, same_dtype
from mla_fx.effects.op import Op


@frozen
class GatherHeads(Op):
    """`q_latent` [T, N, L], `q_rope` [T, N, R] -> [T, H, L], [T, H, R] with H = N * `ranks`."""

    ranks: int
    operands: ClassVar = ("q_latent", "q_rope")
    results: ClassVar = ("q_latent_all", "q_rope_all")
    communicates: ClassVar = "dcp"

    def shape_rule(self, q_latent: Aval, q_rope: Aval) -> tuple[Aval, ...]:
        """Heads are multiplied by the ranks."""
        axes = match(self.name, q_latent=(q_latent, "T N L"), q_rope=(q_rope, "T N R"))
        dtype = same_dtype(self.name, q_latent=q_latent, q_rope=q_rope)
        if self.ranks < 1:
            raise ShapeError(f"{self.name}: ranks must be at least 1: got {self.ranks}")
        heads = axes["N"] * self.ranks
        return Aval((axes["T"], heads, axes["L"]), dtype), Aval((axes["T"], heads, axes["R"]), dtype)
