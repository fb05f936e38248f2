"""The definition: every op in float64, written line for line from the formula of its descriptor.

Slow on purpose where the formula is a loop.  What the lengths do not reach is
never read, so it may hold anything.
"""

if __name__ != "mla_fx.backends.reference":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.reference', not {__name__!r}")

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from mla_fx.backends.backend import Rule
from mla_fx.backends.reference import (
    absorb_query,
    add,
    all_gather,
    all_reduce,
    all_to_all,
    combine,
    current_attention,
    embedding,
    gate_logits,
    gather_heads,
    gating_top_k,
    grouped_linear,
    history_attention,
    linear,
    local_heads,
    permute_tokens,
    quant_grouped_linear,
    quant_linear,
    rms_norm,
    rope,
    rope_angles,
    swiglu,
    take_rows,
    unpermute_tokens,
    v_up,
    write_cache,
)
from mla_fx.effects import Op, ops

#: Op to rule.  A rule takes tensors and the op's parameters, and returns a tuple of new tensors.
RULES: Final[Mapping[type[Op], Rule]] = MappingProxyType(
    {
        ops.Linear: linear.rule,
        ops.RmsNorm: rms_norm.rule,
        ops.AbsorbQuery: absorb_query.rule,
        ops.RopeAngles: rope_angles.rule,
        ops.Rope: rope.rule,
        ops.WriteCache: write_cache.rule,
        ops.GatherHeads: gather_heads.rule,
        ops.LocalHeads: local_heads.rule,
        ops.HistoryAttention: history_attention.rule,
        ops.CurrentAttention: current_attention.rule,
        ops.AllToAll: all_to_all.rule,
        ops.Combine: combine.rule,
        ops.VUp: v_up.rule,
        ops.AllReduce: all_reduce.rule,
        ops.Add: add.rule,
        ops.Embedding: embedding.rule,
        ops.TakeRows: take_rows.rule,
        ops.Swiglu: swiglu.rule,
        ops.GateLogits: gate_logits.rule,
        ops.GatingTopK: gating_top_k.rule,
        ops.PermuteTokens: permute_tokens.rule,
        ops.GroupedLinear: grouped_linear.rule,
        ops.UnpermuteTokens: unpermute_tokens.rule,
        ops.QuantLinear: quant_linear.rule,
        ops.QuantGroupedLinear: quant_grouped_linear.rule,
        ops.AllGather: all_gather.rule,
    }
)
