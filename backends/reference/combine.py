"""Reference rule of `ops.Combine`."""

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
    """out = sum_i w[i] * o[i] / sum_i w[i] with w[i] = exp(lse[i] - m); where lse[i] is infinite, i is left out."""
    o = torch.cat([recv, local[None]])
    lse = torch.cat([recv_lse, local_lse[None]])
    unseen = lse.isinf()
    m = lse.masked_fill(unseen, -math.inf).amax(0)
    w = torch.where(unseen, 0, torch.exp(lse - m))
    o = torch.where(unseen[..., None], 0, o)
    total = w.sum(0)[..., None]
    out = (w[..., None] * o).sum(0) / torch.where(total == 0, 1, total)
    return (out.flatten(1) if flat else out,)
