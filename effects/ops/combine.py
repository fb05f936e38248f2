"""Merge the history partials of all ranks and the local current part, in one normalisation.

With contributions i = 0..W-1 from `recv` and the local one last:

    m         = max_i lse[i]
    w[i]      = exp(lse[i] - m)                     0 where lse[i] = -inf
    out[t, n] = sum_i w[i] * o[i] / sum_i w[i]      0 where every lse is -inf

A contribution whose LSE is -inf saw no key and weighs nothing: its output may
hold anything, NaN included.  Accumulated in float32 (float64 beside float64),
stored in the payload dtype.  The local part is read where it lies.  Source:
log-sum-exp merge of partial softmax (FlashAttention, split keys).
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, ShapeError, lse_lanes, match, require_dtype, same_dtype, wide_dtype
from mla_fx.effects.op import Op


@frozen
class Combine(Op):
    """`recv` [W, T, N, E], `local` [T, N, L], `local_lse` [T, N] -> [T, N, L]."""

    operands: ClassVar = ("recv", "local", "local_lse")
    results: ClassVar = ("attn",)

    def shape_rule(self, recv: Aval, local: Aval, local_lse: Aval) -> tuple[Aval, ...]:
        """E is L and the LSE lanes of the payload dtype."""
        axes = match(self.name, recv=(recv, "W T N E"), local=(local, "T N L"), local_lse=(local_lse, "T N"))
        dtype = same_dtype(self.name, recv=recv, local=local)
        require_dtype(self.name, "local_lse", local_lse, wide_dtype(dtype))
        if axes["E"] != axes["L"] + lse_lanes(dtype):
            raise ShapeError(
                f"{self.name}: axis E of recv must be L + {lse_lanes(dtype)} LSE lanes of {dtype} = "
                f"{axes['L'] + lse_lanes(dtype)}: got {axes['E']}"
            )
        return (local,)
