"""CUDA rule of `ops.QuantLinear`: torch._int_mm between two scalings."""

import torch
from torch.nn import functional

from mla_fx.backends.cuda.calls.quantise import quantise
from mla_fx.backends.device import Run

#: torch._int_mm on CUDA takes more than 16 rows, and multiples of 8 features on both sides.
ROWS, FEATURES = 32, 8


def rule(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Steps and scaling in float32 (float64 beside float64), sums in int32, rounded once to the dtype of `x`."""
    q, step = quantise(x, scale.dtype)
    total = integers(q.to(torch.int8), weight).to(scale.dtype)
    return (total.mul_(step).mul_(scale).to(x.dtype),)


def integers(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`q` [T, D] times `weight` [F, D] transposed, int8 to int32; padded with zeros to what the operator takes."""
    (tokens, inner), features = q.shape, weight.shape[0]
    more = -inner % FEATURES if inner else FEATURES
    q = functional.pad(q, (0, more, 0, max(ROWS - tokens, 0)))
    if more or features % FEATURES:
        weight = functional.pad(weight, (0, more, 0, -features % FEATURES))
    return torch._int_mm(q.contiguous(), weight.contiguous().t())[:tokens, :features]
