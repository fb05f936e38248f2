"""Ascend rule of `ops.TakeRows`."""

import torch


def rule(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor]:
    """out[o] = x[rows[o]]."""
    return (torch.index_select(x, 0, rows),)
