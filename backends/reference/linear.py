"""Reference rule of `ops.Linear`."""

import torch


def rule(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    """out[t, f] = sum_d x[t, d] * weight[f, d]."""
    return (torch.einsum("td,fd->tf", x, weight).contiguous(),)
