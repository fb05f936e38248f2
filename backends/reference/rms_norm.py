"""Reference rule of `ops.RmsNorm`."""

import torch

from mla_fx.backends.device import Run


def rule(x: torch.Tensor, weight: torch.Tensor, *, run: Run, epsilon: float) -> tuple[torch.Tensor]:
    """out[t, d] = x[t, d] / sqrt(mean_d x[t, d]^2 + epsilon) * weight[d] for d < len(weight)."""
    x = x[:, : len(weight)]
    mean = (x**2).mean(1, keepdim=True)
    return ((x / torch.sqrt(mean + epsilon) * weight).contiguous(),)
