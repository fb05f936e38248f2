"""CPU rule of `ops.Linear`."""

import torch

from mla_fx.backends.cpu.products import linear
from mla_fx.backends.device import Run


def rule(x: torch.Tensor, weight: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """`x` [T, D] times `weight` [F, D] transposed, kept as `products.packed` has it."""
    return (linear(x, weight),)
