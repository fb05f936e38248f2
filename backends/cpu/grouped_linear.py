"""CPU rule of `ops.GroupedLinear`: all experts that have rows, in one call where the kernel does it."""

import torch

from mla_fx.backends.cpu.products import grouped
from mla_fx.backends.device import Run


def rule(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Weights as `products.packed` has them; rows behind the last count are left as they come."""
    return (grouped(rows, weight, counts),)
