"""Exchange history partials by heads: each rank gets what all ranks computed for its own heads.

    recv[s, t, n, :L] of rank r = out of rank s [t, r * N + n]
    recv[s, t, n, L:] of rank r = the bits of lse of rank s [t, r * N + n]

One message: the LSE travels bit-exact in the payload's own dtype, as two
16-bit lanes beside bf16 and fp16 (low half first), one lane beside fp32 and
fp64.  The lanes are bits, not numbers: `mla_fx.payload` packs and unpacks
them.  Source: vLLM's `a2a` DCP backend.
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, ShapeError, lse_lanes, match, require_dtype, same_dtype, wide_dtype
from mla_fx.effects.op import Op


@frozen
class AllToAll(Op):
    """`out` [T, H, L], `lse` [T, H] -> `recv` [W, T, N, E] with E = L + lanes, N = H / W, W = `ranks`."""

    ranks: int
    operands: ClassVar = ("out", "lse")
    results: ClassVar = ("recv",)
    communicates: ClassVar = "dcp"

    def shape_rule(self, out: Aval, lse: Aval) -> tuple[Aval, ...]:
        """The group must divide the heads; the LSE has the dtype that goes with the output's."""
        axes = match(self.name, out=(out, "T H L"), lse=(lse, "T H"))
        dtype = same_dtype(self.name, out=out)
        require_dtype(self.name, "lse", lse, wide_dtype(dtype))
        if axes["H"] % self.ranks:
            raise ShapeError(
                f"{self.name}: axis H of out must be a multiple of the ranks, {self.ranks}: got {axes['H']}"
            )
        shape = (self.ranks, axes["T"], axes["H"] // self.ranks, axes["L"] + lse_lanes(dtype))
        return (Aval(shape, dtype),)
