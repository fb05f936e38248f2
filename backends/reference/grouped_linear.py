"""Reference rule of `ops.GroupedLinear`."""

import torch

from mla_fx.backends.device import Run


def rule(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """out[g, f] = sum_d rows[g, d] * weight[y, f, d] for the counts[y] rows g of expert y; 0 behind them."""
    out = rows.new_zeros(len(rows), weight.shape[1])
    first = 0
    for y, count in enumerate(counts.tolist()):
        of_expert = slice(first, first + count)
        out[of_expert] = torch.einsum("gd,fd->gf", rows[of_expert], weight[y])
        first += count
    return (out,)
