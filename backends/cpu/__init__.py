"""Fast on a CPU: native dtypes, accumulation in float32 (float64 beside float64), few calls an op.

Results have the operands' dtype.  Nothing is widened as a whole: the history
goes by in tiles.  What the lengths do not reach never enters the arithmetic.
"""

if __name__ != "mla_fx.backends.cpu":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.cpu', not {__name__!r}")

from typing import Final

from mla_fx.backends import common
from mla_fx.backends.cpu import (
    absorb_query,
    all_to_all,
    combine,
    current_attention,
    expanded_attention,
    fused,
    gate_logits,
    grouped_linear,
    history_attention,
    linear,
    permute_tokens,
    products,
    quant_grouped_linear,
    quant_linear,
    rms_norm,
    rope,
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
        **common.RULES,
        ops.AbsorbQuery: absorb_query.rule,
        ops.AllToAll: all_to_all.rule,
        ops.Combine: combine.rule,
        ops.CurrentAttention: current_attention.rule,
        ops.ExpandedAttention: expanded_attention.rule,
        ops.GateLogits: gate_logits.rule,
        ops.GroupedLinear: grouped_linear.rule,
        ops.HistoryAttention: history_attention.rule,
        ops.Linear: linear.rule,
        ops.PermuteTokens: permute_tokens.rule,
        ops.QuantGroupedLinear: quant_grouped_linear.rule,
        ops.QuantLinear: quant_linear.rule,
        ops.RmsNorm: rms_norm.rule,
        ops.Rope: rope.rule,
        ops.Swiglu: swiglu.rule,
        ops.UnpermuteTokens: unpermute_tokens.rule,
        ops.VUp: v_up.rule,
        ops.WriteRows: write_rows.rule,
    },
    forms={
        ops.GateLogits: {"weight": gate_logits.ready},
        ops.GroupedLinear: {"weight": products.packed},
        ops.Linear: {"weight": products.packed},
        ops.QuantGroupedLinear: {"weight": products.packed},
        ops.QuantLinear: {"weight": products.packed},
    },
).with_fusions(*fused.ALL)
