"""CPU rule of `ops.VUp`."""

import torch

from mla_fx.backends.device import Run
from mla_fx.effects import Group


def rule(attn: torch.Tensor, w_uv: torch.Tensor, *, run: Run, group: Group | None, flat: bool) -> tuple[torch.Tensor]:
    """One matrix product a head, then heads side by side."""
    first = run.rank * attn.shape[1] if group else 0
    w_uv = w_uv[first : first + attn.shape[1]]
    out = torch.bmm(attn.transpose(0, 1), w_uv).transpose(0, 1).contiguous()
    return (out.flatten(1) if flat else out,)
