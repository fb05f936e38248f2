"""CPU rule of `ops.Combine`."""

import math

import torch

from mla_fx.backends.device import Run


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
    if unseen.any():
        # Selected away, since 0 * NaN is NaN; softmax itself gives NaN where every LSE is -inf.
        weights = torch.softmax(lse.masked_fill(unseen, -math.inf), 0).masked_fill(unseen, 0).unsqueeze(-1)
        unseen = unseen.unsqueeze(-1)
        recv = recv.masked_fill(unseen[:-1], 0)
        local = local.masked_fill(unseen[-1], 0)
    else:
        weights = torch.softmax(lse, 0).unsqueeze(-1)
    merged = torch.mul(local, weights[-1])
    for part, weight in zip(recv, weights, strict=False):
        merged.addcmul_(part, weight)
    merged = merged.to(local.dtype).contiguous()
    return (merged.flatten(1) if flat else merged,)
