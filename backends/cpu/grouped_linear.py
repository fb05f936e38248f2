"""CPU rule of `ops.GroupedLinear`: a matrix product for every expert that has rows."""

import torch

from mla_fx.backends.cpu.products import linear
from mla_fx.backends.device import Run


def rule(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Rows behind the last count are left as they come."""
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    first = 0
    for y, count in enumerate(counts.tolist()):
        if count:
            out[first : first + count] = linear(rows[first : first + count], weight[y])
        first += count
    return (out,)
