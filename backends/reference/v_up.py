"""Reference rule of `ops.VUp`."""

import torch

from mla_fx.backends.device import Run
from mla_fx.effects import Group


def rule(attn: torch.Tensor, w_uv: torch.Tensor, *, run: Run, group: Group | None, flat: bool) -> tuple[torch.Tensor]:
    """heads[t, n * V + v] = sum_l attn[t, n, l] * w_uv[n, l, v], or heads[t, n, v]; of a group, its own heads."""
    first = run.rank * attn.shape[1] if group else 0
    w_uv = w_uv[first : first + attn.shape[1]]
    out = torch.einsum("tnl,nlv->tnv", attn, w_uv).contiguous()
    return (out.flatten(1) if flat else out,)
