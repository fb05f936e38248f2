"""Project the merged latent of every head up to its values.

    out[t, n * V + v] = sum_l attn[t, n, l] * w_uv[n, l, v]

Source: the value half of `kv_b_proj`, applied after the attention because
attention and projection are both linear in the latent.
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.op import Op


@frozen
class VUp(Op):
    """`attn` [T, N, L], `w_uv` [N, L, V] -> [T, N * V]."""

    operands: ClassVar = {"attn": "T N L", "w_uv": "N L V"}
    results: ClassVar = ("heads",)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Heads and latent must agree."""
        return (Aval((axes["T"], axes["N"] * axes["V"]), dtype),)
