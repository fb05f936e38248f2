"""Reference rule of `ops.VUp`."""

import torch


def rule(attn: torch.Tensor, w_uv: torch.Tensor) -> tuple[torch.Tensor]:
    """out[t, n * V + v] = sum_l attn[t, n, l] * w_uv[n, l, v]."""
    return (torch.einsum("tnl,nlv->tnv", attn, w_uv).contiguous().flatten(1),)
