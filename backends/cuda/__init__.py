"""On NVIDIA GPUs through torch's own operators: native dtypes, accumulation in float32 (float64 beside float64).

Rules are device-agnostic torch, but for the few operators that CUDA has and a
CPU has not.  None waits for the device: no number is read back, and no shape
depends on one.  They create no stream and no event; they run on the stream
that is current (see `mla_fx.backends.torch_streams`).

What has been run: every rule on CPU tensors against the reference, every rule
on tensors without data, and the streams of programs on a stand-in for the
device module.  Nothing here has run on a GPU so far; the tests that need one
are skipped without it.
"""

if __name__ != "mla_fx.backends.cuda":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.cuda', not {__name__!r}")

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from mla_fx.backends.backend import Rule
from mla_fx.backends.cuda import (
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


def require_gpu() -> None:
    """Raises `InputError` saying what is missing where torch finds no CUDA GPU."""
    if torch.version.cuda is None:
        raise InputError(
            "backend: cuda needs a torch that is built with CUDA (pip install torch==2.13.0 from an index with cu in "
            f"its name) and an NVIDIA GPU: got torch {torch.__version__}, built without"
        )
    if not torch.cuda.is_available():
        raise InputError(
            f"backend: cuda needs an NVIDIA GPU and a driver for CUDA {torch.version.cuda}: got torch "
            f"{torch.__version__}, which finds none"
        )
