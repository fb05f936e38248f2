"""CPU rule of `ops.GateLogits`."""

import torch
from torch.nn import functional


def rule(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    """Both operands widened to float32 (they stay float64 where they are)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (functional.linear(x.to(wide), weight.to(wide)),)
