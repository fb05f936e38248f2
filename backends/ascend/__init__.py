"""On Ascend through torch_npu: the operators of CANN where one does what an op says, plain torch beside them.

Every limit of an operator is a check of ours, with an error that names field,
rule and value, before the call: the meta kernels check next to nothing, and
CANN answers with a number.  Rules create no stream and no event; they run on
the stream that is current (see `mla_fx.backends.torch_streams`).  Importing
this package does not import torch_npu.

What is here has run on the emulated CANN of `emulator`, on no NPU so far.
Routed experts and 8-bit weights have no rules here yet: a program with them is
refused when it is compiled.
"""

if __name__ != "mla_fx.backends.ascend":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.ascend', not {__name__!r}")

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Final

import torch

from mla_fx.backends.ascend import (
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
from mla_fx.backends.backend import Rule
from mla_fx.effects import InputError, Op, ops

#: Op to rule.  A collective's rule is a generator (see `mla_fx.backends.torch_streams`).
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


def require_torch_npu() -> None:
    """Import torch_npu; raises `InputError` saying what to install where it is missing or finds no NPU."""
    advice = (
        "backend: ascend needs torch_npu==2.13.0 (pip install 'mla-fx[ascend]') and CANN with an NPU; "
        "without one, call mla_fx.backends.ascend.emulator.emulate() first"
    )
    try:
        import_module("torch_npu")
    except ImportError as error:
        raise InputError(f"{advice}: got {error}") from None
    if not torch.get_device_module("npu").is_available():
        raise InputError(f"{advice}: got no NPU")
