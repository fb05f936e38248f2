"""CPU rule of `ops.Combine`."""

import math
from collections.abc import Sequence

import torch

from mla_fx.backends.cpu.kernel import FORMATS, Tensors, function, room
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.device import Run


def several(
    recv: Tensors,
    recv_lse: Tensors,
    local: Tensors,
    local_lse: Tensors,
    *,
    runs: Sequence[Run],
    flat: bool,
) -> Sequence[Tensors]:
    """Weigh one contribution after the other into float32 (float64 beside float64), and round once."""
    operands = recv, recv_lse, local, local_lse
    if not takes(local[0], local[0], local_lse[0], recv[0][:1], recv_lse[0][:1]):
        merged = [plain(*mine) for mine in zip(*operands, strict=True)]
        return ([one.flatten(1) if flat else one for one in merged],)
    tokens, heads, latent = local[0].shape
    outs = room(local, tokens, heads * latent) if flat else room(local, tokens, heads, latent)
    strides, sizes = (recv[0].stride(0), recv_lse[0].stride(0)), (len(recv[0]), tokens * heads, latent)
    combine = function("mla_fx_combine", "iiiiiii")
    combine((*operands, outs), FORMATS[local[0].dtype], *strides, *sizes, torch.get_num_threads())
    return (outs,)


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
