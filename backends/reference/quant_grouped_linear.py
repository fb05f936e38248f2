"""Reference rule of `ops.QuantGroupedLinear`."""

import torch

from mla_fx.backends.device import Run
from mla_fx.backends.reference import quant_linear


def rule(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor, *, run: Run
) -> tuple[torch.Tensor]:
    """`quant_linear` of the counts[y] rows of every expert y; 0 behind them."""
    out = rows.new_zeros(len(rows), weight.shape[1])
    first = 0
    for y, count in enumerate(counts.tolist()):
        of_expert = slice(first, first + count)
        (out[of_expert],) = quant_linear.rule(rows[of_expert], weight[y], scale[y], run=run)
        first += count
    return (out,)
