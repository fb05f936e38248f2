"""Reference rule of `ops.Linear`."""

import torch

from mla_fx.backends.device import Run


def rule(x: torch.Tensor, weight: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """out[t, f] = sum_d x[t, d] * weight[f, d]."""
    return (torch.einsum("td,fd->tf", x, weight).contiguous(),)
