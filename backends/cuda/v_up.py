"""CUDA rule of `ops.VUp`."""

import torch

from mla_fx.backends.cuda.calls.product import per_head
from mla_fx.backends.device import Run


def rule(attn: torch.Tensor, w_uv: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """A matrix for each head, then heads side by side: no more than another view of the result."""
    heads, _, value = w_uv.shape
    return (per_head(attn, w_uv).view(attn.shape[0], heads * value),)
