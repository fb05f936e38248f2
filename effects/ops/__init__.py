"""The closed list of ops.  One op, one stem: the file here, rules in files of its name, a test.

An op of a single backend, made of these, stands with that backend.
"""

import inspect
from typing import Final

from mla_fx.effects.op import Op, stem
from mla_fx.effects.ops.absorb_query import AbsorbQuery as AbsorbQuery
from mla_fx.effects.ops.add import Add as Add
from mla_fx.effects.ops.all_gather import AllGather as AllGather
from mla_fx.effects.ops.all_reduce import AllReduce as AllReduce
from mla_fx.effects.ops.all_to_all import AllToAll as AllToAll
from mla_fx.effects.ops.combine import Combine as Combine
from mla_fx.effects.ops.combine_tokens import CombineTokens as CombineTokens
from mla_fx.effects.ops.current_attention import CurrentAttention as CurrentAttention
from mla_fx.effects.ops.dispatch_tokens import DispatchTokens as DispatchTokens
from mla_fx.effects.ops.embedding import Embedding as Embedding
from mla_fx.effects.ops.expanded_attention import ExpandedAttention as ExpandedAttention
from mla_fx.effects.ops.gate_logits import GateLogits as GateLogits
from mla_fx.effects.ops.gather_heads import GatherHeads as GatherHeads
from mla_fx.effects.ops.gating_top_k import GatingTopK as GatingTopK
from mla_fx.effects.ops.grouped_linear import GroupedLinear as GroupedLinear
from mla_fx.effects.ops.history_attention import WORKSPACE as WORKSPACE
from mla_fx.effects.ops.history_attention import HistoryAttention as HistoryAttention
from mla_fx.effects.ops.join_tokens import JoinTokens as JoinTokens
from mla_fx.effects.ops.linear import Linear as Linear
from mla_fx.effects.ops.local_heads import LocalHeads as LocalHeads
from mla_fx.effects.ops.permute_tokens import PermuteTokens as PermuteTokens
from mla_fx.effects.ops.prefetch import Prefetch as Prefetch
from mla_fx.effects.ops.quant_grouped_linear import QuantGroupedLinear as QuantGroupedLinear
from mla_fx.effects.ops.quant_linear import QuantLinear as QuantLinear
from mla_fx.effects.ops.rms_norm import RmsNorm as RmsNorm
from mla_fx.effects.ops.rope import Rope as Rope
from mla_fx.effects.ops.rope_angles import RopeAngles as RopeAngles
from mla_fx.effects.ops.split_tokens import SplitTokens as SplitTokens
from mla_fx.effects.ops.swiglu import Swiglu as Swiglu
from mla_fx.effects.ops.take_rows import TakeRows as TakeRows
from mla_fx.effects.ops.unpermute_tokens import UnpermuteTokens as UnpermuteTokens
from mla_fx.effects.ops.v_up import VUp as VUp
from mla_fx.effects.ops.write_rows import WriteRows as WriteRows

#: Every op, in the order of a decode step: attention, then the rest of a model.
ALL: Final[tuple[type[Op], ...]] = (
    Linear,
    RmsNorm,
    AbsorbQuery,
    RopeAngles,
    Rope,
    WriteRows,
    GatherHeads,
    LocalHeads,
    HistoryAttention,
    CurrentAttention,
    ExpandedAttention,
    AllToAll,
    Combine,
    VUp,
    AllReduce,
    Add,
    Embedding,
    TakeRows,
    Swiglu,
    GateLogits,
    GatingTopK,
    DispatchTokens,
    PermuteTokens,
    GroupedLinear,
    UnpermuteTokens,
    CombineTokens,
    QuantLinear,
    QuantGroupedLinear,
    AllGather,
    SplitTokens,
    JoinTokens,
    Prefetch,
)


def listing() -> str:
    """All ops as a table in Markdown: what each takes and gives, and what for, as its own docstrings say."""
    lines = ["| op | takes | gives | |", "|---|---|---|---|"]
    for op in ALL:
        what = (inspect.getdoc(inspect.getmodule(op)) or "").partition("\n")[0]
        told = [" ".join(part.split()) for part in (inspect.getdoc(op) or "").split("\n\n")]
        takes, gives = next(part for part in told if " -> " in part).split(" -> ")
        lines.append(f"| `{stem(op)}` | {takes} | {gives.partition('. ')[0].rstrip('.')} | {what} |")
    return "\n".join(lines)
