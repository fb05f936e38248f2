"""Ascend rule of `ops.GroupedLinear`: npu_grouped_matmul."""

import torch

from mla_fx.backends.ascend.calls import grouped as call
from mla_fx.backends.ascend.calls.grouped import grouped
from mla_fx.backends.device import Run
from mla_fx.effects import Aval, ops


def takes(op: ops.GroupedLinear, rows: Aval, weight: Aval, counts: Aval) -> str | None:
    """Experts and features that the operator takes."""
    return call.takes(weight)


def rule(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Rows behind the last count are left as the operator leaves them: unwritten."""
    return (grouped(rows, weight, counts),)
