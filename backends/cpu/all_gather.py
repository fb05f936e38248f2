"""CPU rule of `ops.AllGather`."""

from collections.abc import Sequence

import torch


def rule(operands: Sequence[tuple[torch.Tensor]], *, features: int, ranks: int) -> list[tuple[torch.Tensor]]:
    """One concatenation, a copy for every rank."""
    out = torch.cat([x for (x,) in operands], dim=1)[:, :features].contiguous()
    return [(out,), *((out.clone(),) for _ in operands[1:])]
