"""Ascend rule of `ops.UnpermuteTokens`: npu_moe_finalize_routing (see `calls/experts.py`).

A token's infinities stay its own: the rows of its pairs are read and no others,
so nobody sees what lies behind the last pair.
"""

import torch

from mla_fx.backends.ascend.calls.dtypes import wrong_dtype
from mla_fx.backends.ascend.calls.experts import finalise
from mla_fx.backends.device import Run
from mla_fx.effects import Aval, ops


def takes(op: ops.UnpermuteTokens, rows: Aval, source: Aval, weights: Aval) -> str | None:
    """Rows in a dtype that the operator takes."""
    return wrong_dtype("rows", rows)


def rule(rows: torch.Tensor, source: torch.Tensor, weights: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Weights are float32 beside any dtype of the rows; the sum is in float32 and rounded once."""
    return (finalise(rows, source, weights),)
