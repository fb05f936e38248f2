"""Ascend rule of `ops.Prefetch`: npu_prefetch, which brings memory into the L2 cache, on the stream that is current."""

import torch

from mla_fx.backends.device import Run


def rule(weight: torch.Tensor, after: torch.Tensor, *, run: Run) -> tuple[()]:
    """All of the weight.  The operator's own `dependency` orders graphs only; eagerly the stream's order counts."""
    if weight.nbytes:
        torch.ops.npu.npu_prefetch(weight, after, weight.nbytes)
    return ()
