"""CUDA rule of `ops.GateLogits`."""

import torch

from mla_fx.backends.cuda.calls.product import wide_product


def rule(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    """Products of the operands as they are, sums and result in float32 (float64 beside float64)."""
    return (wide_product(x, weight.t()),)
