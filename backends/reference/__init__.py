"""The definition: every op in float64, written line for line from the formula of its descriptor.

Slow on purpose where the formula is a loop.  What the lengths do not reach is
never read, so it may hold anything.
"""

if __name__ != "mla_fx.backends.reference":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.reference', not {__name__!r}")

from typing import Final

from mla_fx.backends import common
from mla_fx.backends.reference import (
    absorb_query,
    combine,
    current_attention,
    embedding,
    expanded_attention,
    gate_logits,
    gating_top_k,
    grouped_linear,
    history_attention,
    linear,
    permute_tokens,
    quant_grouped_linear,
    quant_linear,
    rms_norm,
    rope,
    rope_angles,
    swiglu,
    unpermute_tokens,
    v_up,
    write_rows,
)
from mla_fx.backends.table import Table
from mla_fx.effects import ops

#: What this backend does.
TABLE: Final = Table(
    {
        **common.EXACT,
        ops.AbsorbQuery: absorb_query.rule,
        ops.Combine: combine.rule,
        ops.CurrentAttention: current_attention.rule,
        ops.Embedding: embedding.rule,
        ops.ExpandedAttention: expanded_attention.rule,
        ops.GateLogits: gate_logits.rule,
        ops.GatingTopK: gating_top_k.rule,
        ops.GroupedLinear: grouped_linear.rule,
        ops.HistoryAttention: history_attention.rule,
        ops.Linear: linear.rule,
        ops.PermuteTokens: permute_tokens.rule,
        ops.QuantGroupedLinear: quant_grouped_linear.rule,
        ops.QuantLinear: quant_linear.rule,
        ops.RmsNorm: rms_norm.rule,
        ops.Rope: rope.rule,
        ops.RopeAngles: rope_angles.rule,
        ops.Swiglu: swiglu.rule,
        ops.UnpermuteTokens: unpermute_tokens.rule,
        ops.VUp: v_up.rule,
        ops.WriteRows: write_rows.rule,
    },
)
