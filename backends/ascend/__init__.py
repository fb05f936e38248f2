"""On Ascend through torch_npu: the operators of CANN where one does what an op says, plain torch beside them.

Every limit of an operator is asked before a run, by `takes` beside the rule,
whose words name field, rule and value: the meta kernels check next to nothing,
and CANN answers with a number.  Rules create no stream and no event; they run
on the stream that is current (see `mla_fx.backends.body`).  Importing this
package does not import torch_npu.

Attention and 8-bit products in float32, which the operators do not take, are
plain torch, and so is a gate unlike DeepSeek-V3's.  What is here has run on the
emulated CANN of `emulator`, on no NPU so far.
"""

if __name__ != "mla_fx.backends.ascend":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.ascend', not {__name__!r}")

from importlib import import_module
from typing import Final

import torch

from mla_fx.backends import common
from mla_fx.backends.ascend import (
    absorb_query,
    combine,
    current_attention,
    expanded_attention,
    fused,
    gating_top_k,
    grouped_linear,
    history_attention,
    permute_tokens,
    prefetch,
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
from mla_fx.backends.ascend.calls import attention
from mla_fx.backends.ascend.calls.fractal import fractal
from mla_fx.backends.table import Table
from mla_fx.effects import InputError, ops

#: What this backend does.
TABLE: Final = Table(
    {
        **common.RULES,
        ops.AbsorbQuery: absorb_query.rule,
        ops.Combine: combine.rule,
        ops.CurrentAttention: current_attention.rule,
        ops.ExpandedAttention: expanded_attention.rule,
        ops.GatingTopK: gating_top_k.rule,
        ops.GroupedLinear: grouped_linear.rule,
        ops.HistoryAttention: history_attention.rule,
        ops.PermuteTokens: permute_tokens.rule,
        ops.Prefetch: prefetch.rule,
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
    takes={
        ops.Combine: combine.takes,
        ops.CurrentAttention: current_attention.takes,
        ops.ExpandedAttention: expanded_attention.takes,
        ops.GroupedLinear: grouped_linear.takes,
        ops.HistoryAttention: history_attention.takes,
        ops.PermuteTokens: permute_tokens.takes,
        ops.QuantGroupedLinear: quant_grouped_linear.takes,
        ops.QuantLinear: quant_linear.takes,
        ops.UnpermuteTokens: unpermute_tokens.takes,
        ops.WriteRows: write_rows.takes,
    },
    updates={ops.CurrentAttention: attention.updates, ops.HistoryAttention: attention.updates},
    forms={
        **common.FORMS,
        ops.QuantGroupedLinear: {"weight": fractal},
        ops.QuantLinear: {"weight": fractal},
    },
).with_fusions(*fused.ALL)


def require_torch_npu() -> None:
    """Import torch_npu; raises `InputError` saying what to install where it is missing or finds no NPU."""
    advice = (
        "backend: ascend needs torch_npu==2.13.0 (pip install 'mla-fx[ascend]') and CANN with an NPU; "
        "without one, call mla_fx.backends.ascend.emulator.emulate() first, or give --emulate to a command"
    )
    try:
        import_module("torch_npu")
    except ImportError as error:
        raise InputError(f"{advice}: got {error}") from None
    if not torch.get_device_module("npu").is_available():
        raise InputError(f"{advice}: got no NPU")
