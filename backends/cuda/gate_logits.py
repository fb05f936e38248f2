"""CUDA rule of `ops.GateLogits`."""

import torch

from mla_fx.backends.cuda.calls.product import wide_product
from mla_fx.backends.device import Run


def rule(x: torch.Tensor, weight: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Products of the operands as they are, sums and result in float32 (float64 beside float64)."""
    return (wide_product(x, weight.t()),)
