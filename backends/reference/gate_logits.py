"""Reference rule of `ops.GateLogits`."""

import torch

from mla_fx.backends.device import Run


def rule(x: torch.Tensor, weight: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """logits[t, x] = sum_d x[t, d] * weight[x, d]."""
    return (torch.einsum("td,xd->tx", x, weight).contiguous(),)
