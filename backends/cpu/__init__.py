"""Fast on a CPU: native dtypes, accumulation in float32 (float64 beside float64), few calls an op.

Results have the operands' dtype.  Nothing is widened as a whole: the history
goes by in tiles.  What the lengths do not reach never enters the arithmetic.
"""

if __name__ != "mla_fx.backends.cpu":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.cpu', not {__name__!r}")

from collections.abc import Mapping
from typing import Final

from mla_fx.backends import common
from mla_fx.backends.cpu import (
    absorb_query,
    add,
    all_reduce,
    all_to_all,
    combine,
    current_attention,
    embedding,
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
from mla_fx.backends.cpu.together import alone, together
from mla_fx.backends.table import Rule, Table
from mla_fx.effects import Op, ops

#: Rules that are written for several ranks.
SEVERAL: Final[Mapping[type[Op], Rule]] = {
    ops.AbsorbQuery: absorb_query.several,
    ops.Add: add.several,
    ops.Combine: combine.several,
    ops.CurrentAttention: current_attention.several,
    ops.Embedding: embedding.several,
    ops.GroupedLinear: grouped_linear.several,
    ops.HistoryAttention: history_attention.several,
    ops.Linear: linear.several,
    ops.PermuteTokens: permute_tokens.several,
    ops.QuantGroupedLinear: quant_grouped_linear.several,
    ops.QuantLinear: quant_linear.several,
    ops.RmsNorm: rms_norm.several,
    ops.Rope: rope.several,
    ops.Swiglu: swiglu.several,
    ops.UnpermuteTokens: unpermute_tokens.several,
    ops.VUp: v_up.several,
    ops.WriteRows: write_rows.several,
}

#: What this backend does.
TABLE: Final = Table(
    {
        **common.RULES,
        **{op: alone(rule) for op, rule in SEVERAL.items()},
        ops.AllReduce: all_reduce.rule,
        ops.AllToAll: all_to_all.rule,
        ops.ExpandedAttention: expanded_attention.rule,
        ops.GateLogits: gate_logits.rule,
    },
    together={op: together(rule) for op, rule in SEVERAL.items()},
    forms={
        ops.GateLogits: {"weight": gate_logits.ready},
        ops.GroupedLinear: {"weight": products.packed},
        ops.Linear: {"weight": products.packed},
        ops.QuantGroupedLinear: {"weight": products.packed},
        ops.QuantLinear: {"weight": products.packed},
    },
).with_fusions(*fused.ALL)
