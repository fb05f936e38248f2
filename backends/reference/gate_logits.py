"""Reference rule of `ops.GateLogits`."""

import torch


def rule(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    """logits[t, x] = sum_d x[t, d] * weight[x, d]."""
    return (torch.einsum("td,xd->tx", x, weight).contiguous(),)
