"""Ascend rule of `ops.VUp`."""

import torch

from mla_fx.backends.ascend.calls.projection import per_head
from mla_fx.backends.common.local_heads import own_heads
from mla_fx.backends.device import Run
from mla_fx.effects import Group


def rule(attn: torch.Tensor, w_uv: torch.Tensor, *, run: Run, group: Group | None, flat: bool) -> tuple[torch.Tensor]:
    """A matrix for each head, then heads side by side: no more than another view of the result."""
    w_uv = own_heads(w_uv, attn.shape[1], 0, run)
    out = per_head(attn, w_uv)
    return (out.flatten(1) if flat else out,)
