"""Rule of `ops.RmsNorm`."""

import torch
from torch.nn import functional

from mla_fx.backends.device import Run


def rule(x: torch.Tensor, weight: torch.Tensor, *, run: Run, epsilon: float) -> tuple[torch.Tensor]:
    """Norm of the first F features; the library computes 16-bit input in float32 and rounds once."""
    features = weight.shape[0]
    return (functional.rms_norm(x[:, :features], (features,), weight, epsilon).contiguous(),)
