"""CUDA rule of `ops.Combine`."""

import math

import torch

from mla_fx.backends.device import Run
from mla_fx.dtypes import wide


def rule(
    recv: torch.Tensor,
    recv_lse: torch.Tensor,
    local: torch.Tensor,
    local_lse: torch.Tensor,
    *,
    run: Run,
    flat: bool,
) -> tuple[torch.Tensor]:
    """Weigh one contribution after the other into one float32 buffer (float64 beside float64)."""
    lse = torch.cat((recv_lse, local_lse.unsqueeze(0)))
    unseen = lse.isinf()
    # Selected away, since 0 * NaN is NaN; softmax itself gives NaN where every LSE is -inf.
    weights = torch.softmax(lse.masked_fill(unseen, -math.inf), 0).masked_fill(unseen, 0).unsqueeze(-1)
    merged = torch.zeros_like(local, dtype=wide(local.dtype), memory_format=torch.contiguous_format)
    for part, weight, hidden in zip((*recv, local), weights, unseen.unsqueeze(-1), strict=True):
        merged.addcmul_(part.to(merged.dtype).masked_fill(hidden, 0), weight)
    return ((merged.flatten(1) if flat else merged).to(local.dtype),)
