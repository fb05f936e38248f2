"""Ascend rule of `ops.GateLogits`."""

import torch
from torch.nn import functional


def rule(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    """Both operands widened to float32."""
    return (functional.linear(x.to(torch.float32), weight.to(torch.float32)),)
