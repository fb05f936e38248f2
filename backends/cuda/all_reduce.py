"""CUDA rule of `ops.AllReduce`, all ranks on one device."""

from collections.abc import Iterator, Sequence

import torch

from mla_fx.dtypes import wide


def rule(operands: Sequence[tuple[torch.Tensor]]) -> Iterator[tuple[torch.Tensor] | None]:
    """Each rank reads all and sums in rank order in float32, so that all get the same bits; rounded once."""
    for _ in operands:
        (first,), *rest = operands
        total = first.to(wide(first.dtype), copy=True, memory_format=torch.contiguous_format)
        for (x,) in rest:
            total.add_(x)
        yield (total.to(first.dtype),)
