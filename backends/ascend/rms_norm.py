"""Ascend rule of `ops.RmsNorm`: npu_rms_norm."""

import torch

from mla_fx.backends.device import Run


def rule(x: torch.Tensor, weight: torch.Tensor, *, run: Run, epsilon: float) -> tuple[torch.Tensor]:
    """Norm of the first F features, in float32, rounded once.  Epsilon is passed: the operator's default is its own."""
    normed, _ = torch.ops.npu.npu_rms_norm(x[:, : weight.shape[0]], weight, epsilon)
    return (normed.contiguous(),)
