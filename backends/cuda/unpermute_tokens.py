"""CUDA rule of `ops.UnpermuteTokens`."""

import torch

from mla_fx.backends.device import Run


def rule(rows: torch.Tensor, source: torch.Tensor, weights: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Sum in float32 (float64 beside float64), in the order of the experts' scores, rounded once.

    A pair of another rank reads row 0, whatever that holds, and counts as 0: selected, since 0 * NaN is NaN.
    """
    out = rows.new_zeros((source.shape[0], rows.shape[1]), dtype=weights.dtype)
    for of_pair, weight in zip(source.unbind(1), weights.unbind(1), strict=True):
        part = rows.index_select(0, of_pair.clamp_min(0)).to(out.dtype)
        out.add_(part.mul_(weight.unsqueeze(1)).masked_fill_((of_pair < 0).unsqueeze(1), 0))
    return (out.to(rows.dtype),)
