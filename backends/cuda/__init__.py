"""On NVIDIA GPUs through torch's own operators: native dtypes, accumulation in float32 (float64 beside float64).

Rules are device-agnostic torch, but for the few operators that CUDA has and a
CPU has not.  None waits for the device: no number is read back, and no shape
depends on one.  They create no stream and no event; they run on the stream
that is current (see `mla_fx.backends.body`).

What has been run: every rule on CPU tensors against the reference, every rule
on tensors without data, and the streams of programs on a stand-in for the
device module.  Nothing here has run on a GPU so far; the tests that need one
are skipped without it.
"""

if __name__ != "mla_fx.backends.cuda":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.cuda', not {__name__!r}")

from typing import Final

import torch

from mla_fx.backends import common, kernels
from mla_fx.backends.cuda import (
    absorb_query,
    combine,
    current_attention,
    gate_logits,
    grouped_linear,
    history_attention,
    linear,
    permute_tokens,
    quant_grouped_linear,
    quant_linear,
    unpermute_tokens,
    v_up,
    write_rows,
)
from mla_fx.backends.table import Table
from mla_fx.effects import InputError, ops

#: What this backend does.
TABLE: Final = Table(
    {
        **common.RULES,
        ops.AbsorbQuery: absorb_query.rule,
        ops.Combine: combine.rule,
        ops.GateLogits: gate_logits.rule,
        ops.GroupedLinear: grouped_linear.rule,
        ops.HistoryAttention: history_attention.rule,
        ops.Linear: linear.rule,
        ops.PermuteTokens: permute_tokens.rule,
        ops.QuantGroupedLinear: quant_grouped_linear.rule,
        ops.QuantLinear: quant_linear.rule,
        ops.UnpermuteTokens: unpermute_tokens.rule,
        ops.VUp: v_up.rule,
        ops.WriteRows: write_rows.rule,
    },
    captured={
        ops.CurrentAttention: current_attention.captured,
        ops.HistoryAttention: history_attention.captured,
    },
)


def table() -> Table:
    """`TABLE`, with kernels for the exchange where there is a triton, which torch's CUDA builds bring."""
    return kernels.with_kernels(TABLE) if kernels.available() else TABLE


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
