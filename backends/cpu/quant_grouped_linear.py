"""CPU rule of `ops.QuantGroupedLinear`: all experts that have rows, in one call where the kernel does it."""

from collections.abc import Sequence

import torch

from mla_fx.backends.cpu.kernel import Tensors
from mla_fx.backends.cpu.products import by_expert, in_panels, quantized, unpacked
from mla_fx.backends.cpu.quant_linear import plain
from mla_fx.backends.device import Run


def several(
    rows: Tensors,
    weight: Tensors,
    scale: Tensors,
    counts: Tensors,
    *,
    runs: Sequence[Run],
) -> Sequence[Tensors]:
    """`quant_linear` of every expert's rows; those behind the last count are left as they come."""
    if in_panels(rows[0], weight[0]):
        return (quantized(rows, weight, scale, counts),)
    return ([_plain(*mine) for mine in zip(rows, weight, scale, counts, strict=True)],)


def _plain(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    weight = unpacked(weight)
    return by_expert(rows, weight.shape[1], counts, lambda some, y: plain(some, weight[y], scale[y]))
