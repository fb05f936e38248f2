"""CPU rule of `ops.VUp`."""

import torch

from mla_fx.backends.device import Run


def rule(attn: torch.Tensor, w_uv: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """One matrix product a head, then heads side by side."""
    heads, _, value = w_uv.shape
    return (torch.bmm(attn.transpose(0, 1), w_uv).transpose(0, 1).reshape(attn.shape[0], heads * value),)
