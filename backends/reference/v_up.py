"""Reference rule of `ops.VUp`."""

import torch

from mla_fx.backends.device import Run


def rule(attn: torch.Tensor, w_uv: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """out[t, n * V + v] = sum_l attn[t, n, l] * w_uv[n, l, v]."""
    return (torch.einsum("tnl,nlv->tnv", attn, w_uv).contiguous().flatten(1),)
