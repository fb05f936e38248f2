"""Merge the history partials of all ranks and the local current part, in one normalisation.

With contributions i = 0..W-1 from `recv` and the local one last:

    m         = max_i lse[i]                        over those that are finite
    w[i]      = exp(lse[i] - m)                     0 where lse[i] is +inf or -inf
    out[t, n] = sum_i w[i] * o[i] / sum_i w[i]      0 where every lse is infinite

A contribution whose LSE is infinite saw no key and weighs nothing: its output
may hold anything, NaN included.  -inf is the logarithm of an empty sum; +inf is
how FlashMLA and npu_fused_infer_attention_score say the same.  A NaN among the
LSEs is a NaN in the result.  Accumulated in float32 (float64 beside float64),
stored in the dtype of the partials; flat,
heads stand side by side as out[t, n * L + l].  The local part is read where it lies.  Source:
log-sum-exp merge of partial softmax (FlashAttention, split keys).
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.op import Op
from mla_fx.effects.validate import boolean


@frozen
class Combine(Op):
    """History partials of W ranks and the local current part; LSEs are float32 (float64 beside float64).

    `recv` [W, T, N, L], `recv_lse` [W, T, N], `local` [T, N, L], `local_lse` [T, N]
    -> [T, N, L], or `flat` [T, N * L].
    """

    flat: bool = field(default=False, validator=boolean)
    operands: ClassVar = {"recv": "W T N L", "recv_lse": "W T N wide", "local": "T N L", "local_lse": "T N wide"}
    results: ClassVar = ("attn",)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Partials have one dtype, and their LSEs the one beside it."""
        shape = (axes["N"] * axes["L"],) if self.flat else (axes["N"], axes["L"])
        return (Aval((axes["T"], *shape), dtype),)
