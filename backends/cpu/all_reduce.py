"""CPU rule of `ops.AllReduce`."""

from collections.abc import Sequence

import torch

from mla_fx.dtypes import wide


def rule(operands: Sequence[tuple[torch.Tensor]]) -> list[tuple[torch.Tensor]]:
    """Sum in rank order in float32 (float64 beside float64), rounded once, a copy for every rank."""
    first = operands[0][0]
    total = first.to(wide(first.dtype), copy=True, memory_format=torch.contiguous_format)
    for (x,) in operands[1:]:
        total.add_(x)
    out = total.to(first.dtype)
    return [(out,), *((out.clone(),) for _ in operands[1:])]
