"""Rules that several backends share: plain torch that runs on any device and waits for none, and all collectives.

Native dtypes, accumulation in float32 (float64 beside float64), rounded once.
A backend's table starts from this one and says what it does its own way.
"""

if __name__ != "mla_fx.backends.common":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.common', not {__name__!r}")

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from mla_fx.backends.common import (
    add,
    all_gather,
    all_reduce,
    all_to_all,
    combine_tokens,
    current_attention,
    dispatch_tokens,
    embedding,
    expanded_attention,
    gate_logits,
    gather_heads,
    gating_top_k,
    join_tokens,
    linear,
    local_heads,
    prefetch,
    rms_norm,
    rope,
    rope_angles,
    split_tokens,
    swiglu,
    take_rows,
)
from mla_fx.backends.table import Collective, Form, Rule
from mla_fx.effects import Op, ops

#: The rules of collectives, the same on every backend.
COLLECTIVES: Final[Mapping[type[Op], Collective]] = MappingProxyType(
    {
        ops.AllGather: Collective(all_gather.send, all_gather.receive, all_gather.together),
        ops.AllReduce: Collective(all_reduce.send, all_reduce.receive, all_reduce.together),
        ops.AllToAll: Collective(all_to_all.send, all_to_all.receive, all_to_all.together),
        ops.CombineTokens: Collective(combine_tokens.send, combine_tokens.receive),
        ops.DispatchTokens: Collective(dispatch_tokens.send, dispatch_tokens.receive),
        ops.GatherHeads: Collective(gather_heads.send, gather_heads.receive, gather_heads.together),
    }
)
#: Rules that are the formula in any dtype, float64 too: the reference has them as they are.
EXACT: Final[Mapping[type[Op], Rule | Collective]] = MappingProxyType(
    {
        **COLLECTIVES,
        ops.Add: add.rule,
        ops.JoinTokens: join_tokens.rule,
        ops.LocalHeads: local_heads.rule,
        ops.Prefetch: prefetch.rule,
        ops.SplitTokens: split_tokens.rule,
        ops.TakeRows: take_rows.rule,
    }
)
#: All rules that are shared.
RULES: Final[Mapping[type[Op], Rule | Collective]] = MappingProxyType(
    {
        **EXACT,
        ops.CurrentAttention: current_attention.rule,
        ops.Embedding: embedding.rule,
        ops.ExpandedAttention: expanded_attention.rule,
        ops.GateLogits: gate_logits.rule,
        ops.GatingTopK: gating_top_k.rule,
        ops.Linear: linear.rule,
        ops.RmsNorm: rms_norm.rule,
        ops.Rope: rope.rule,
        ops.RopeAngles: rope_angles.rule,
        ops.Swiglu: swiglu.rule,
    }
)
#: The forms that shared rules want operands in.
FORMS: Final[Mapping[type[Op], Mapping[str, Form]]] = MappingProxyType(
    {ops.GateLogits: MappingProxyType({"weight": gate_logits.widened})}
)
