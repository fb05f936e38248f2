"""CPU rule of `ops.VUp`."""

import torch

from mla_fx.backends.common.local_heads import own_heads
from mla_fx.backends.cpu.products import of_heads
from mla_fx.backends.device import Run
from mla_fx.effects import Group


def rule(attn: torch.Tensor, w_uv: torch.Tensor, *, run: Run, group: Group | None, flat: bool) -> tuple[torch.Tensor]:
    """One matrix product a head, then heads side by side."""
    out = of_heads(attn, own_heads(w_uv, attn.shape[1], 0, run))
    return (out.flatten(1) if flat else out,)
