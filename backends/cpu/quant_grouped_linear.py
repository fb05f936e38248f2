"""CPU rule of `ops.QuantGroupedLinear`: an integer matrix product for every expert that has rows."""

import torch

from mla_fx.backends.cpu import quant_linear
from mla_fx.backends.device import Run


def rule(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor, *, run: Run
) -> tuple[torch.Tensor]:
    """`quant_linear` of every expert's rows; those behind the last count are left as they come."""
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    first = 0
    for y, count in enumerate(counts.tolist()):
        if count:
            (out[first : first + count],) = quant_linear.rule(rows[first : first + count], weight[y], scale[y], run=run)
        first += count
    return (out,)
