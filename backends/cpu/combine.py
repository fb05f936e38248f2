"""CPU rule of `ops.Combine`."""

import math

import torch

from mla_fx.backends.cpu.kernel import FORMATS, function
from mla_fx.backends.cpu.pointwise import takes
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
    """Weigh one contribution after the other into float32 (float64 beside float64), and round once."""
    if takes(local, local, local_lse, recv[:1], recv_lse[:1]):
        merged = torch.empty_like(local)
        ranks, rows, latent = len(recv), local_lse.numel(), local.shape[2]
        parts = recv.data_ptr(), recv.stride(0), recv_lse.data_ptr(), recv_lse.stride(0)
        own = local.data_ptr(), local_lse.data_ptr()
        function("mla_fx_combine", "iplplpppllli")(
            FORMATS[local.dtype], *parts, *own, merged.data_ptr(), ranks, rows, latent, torch.get_num_threads()
        )
    else:
        merged = plain(recv, recv_lse, local, local_lse)
    return (merged.flatten(1) if flat else merged,)


def plain(recv: torch.Tensor, recv_lse: torch.Tensor, local: torch.Tensor, local_lse: torch.Tensor) -> torch.Tensor:
    """The same by torch alone."""
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
    return merged.to(local.dtype).contiguous()
