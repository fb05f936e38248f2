"""CUDA rule of `ops.Linear`."""

import torch

from mla_fx.backends.cuda.calls.product import product


def rule(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    """`x` [T, D] times `weight` [F, D] transposed."""
    return (product(x, weight.t()),)
