"""CUDA rule of `ops.Add`."""

import torch


def rule(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    """out = x + y."""
    return ((x + y).contiguous(),)
