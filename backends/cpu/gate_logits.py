"""CPU rule of `ops.GateLogits`."""

import torch
from torch.nn import functional

from mla_fx.dtypes import wide


def rule(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    """Both operands widened to float32 (they stay float64 where they are)."""
    kind = wide(x.dtype)
    return (functional.linear(x.to(kind), weight.to(kind)),)
