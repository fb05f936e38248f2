"""Rule of `ops.Linear`."""

import torch
from torch.nn import functional

from mla_fx.backends.device import Run


def rule(x: torch.Tensor, weight: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """`x` [T, D] times `weight` [F, D] transposed; the library accumulates 16-bit products in float32."""
    return (functional.linear(x, weight),)
