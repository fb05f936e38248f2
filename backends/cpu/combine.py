"""CPU rule of `ops.Combine`."""

import math

import torch

from mla_fx.payload import unpack


def rule(recv: torch.Tensor, local: torch.Tensor, local_lse: torch.Tensor) -> tuple[torch.Tensor]:
    """Weigh one contribution after the other into one float32 buffer (float64 beside float64)."""
    parts, lse = unpack(recv, latent=local.shape[-1])
    lse = torch.cat((lse, local_lse.unsqueeze(0)))
    weights = torch.softmax(lse, 0).unsqueeze(-1)
    unseen = (lse == -math.inf).unsqueeze(-1)
    if unseen.any():
        # Selected away, since 0 * NaN is NaN; softmax itself gives NaN where every LSE is -inf.
        weights = weights.masked_fill(unseen, 0)
        parts = parts.masked_fill(unseen[:-1], 0)
        local = local.masked_fill(unseen[-1], 0)
    merged = torch.mul(local, weights[-1])
    for part, weight in zip(parts, weights, strict=False):
        merged.addcmul_(part, weight)
    return (merged.to(local.dtype).contiguous(),)
