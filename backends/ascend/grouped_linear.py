"""Ascend rule of `ops.GroupedLinear`: npu_grouped_matmul."""

import torch

from mla_fx.backends.ascend.calls.grouped import grouped


def rule(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor]:
    """Rows behind the last count are left as the operator leaves them: unwritten."""
    return (grouped(rows, weight, counts),)
