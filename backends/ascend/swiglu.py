"""Ascend rule of `ops.Swiglu`: npu_swiglu, which takes the gate first."""

import torch


def rule(x: torch.Tensor) -> tuple[torch.Tensor]:
    """Computed in float32 and rounded once, by the operator."""
    return (torch.ops.npu.npu_swiglu(x, -1),)
