"""Ascend rule of `ops.Swiglu`: npu_swiglu, which takes nothing strided and nothing empty."""

import torch

from mla_fx.backends.device import Run


def rule(x: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """The gate is the first half of the features, as the operator has it."""
    if not x.numel():
        return (x.new_empty((x.shape[0], x.shape[1] // 2)),)
    return (torch.ops.npu.npu_swiglu(x.contiguous(), -1),)
