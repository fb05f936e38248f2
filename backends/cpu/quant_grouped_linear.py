"""CPU rule of `ops.QuantGroupedLinear`: all experts that have rows, in one call where the kernel does it."""

import torch

from mla_fx.backends.cpu.products import by_expert, in_panels, quantized, unpacked
from mla_fx.backends.cpu.quant_linear import plain
from mla_fx.backends.device import Run


def rule(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor, *, run: Run
) -> tuple[torch.Tensor]:
    """`quant_linear` of every expert's rows; those behind the last count are left as they come."""
    if in_panels(rows, weight):
        return (quantized(rows, weight, scale, counts),)
    weight = unpacked(weight)
    return (by_expert(rows, weight.shape[1], counts, lambda some, y: plain(some, weight[y], scale[y])),)
