"""Distributed rule of `ops.AllReduce`.

The transport adds in its own order and precision.  Ranks must get the same
bits, or they go apart over the steps: the emulated HCCL adds in rank order and
in float32, gloo gives to all what one rank added; of a real HCCL that is asked
with HCCL_DETERMINISTIC=true, which has not been tried.
"""

from typing import Any

import torch
import torch.distributed as dist


def rule(x: torch.Tensor, *, group: Any) -> tuple[torch.Tensor]:
    """The sum of all ranks, in the dtype of `x`, which stays as it is."""
    total = x.clone(memory_format=torch.contiguous_format)
    if total.numel():
        dist.all_reduce(total, group=group)
    return (total,)
