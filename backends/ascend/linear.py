"""Ascend rule of `ops.Linear`."""

import torch
from torch.nn import functional


def rule(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    """`x` [T, D] times `weight` [F, D] transposed; 16-bit products are added up in float32."""
    return (functional.linear(x, weight),)
