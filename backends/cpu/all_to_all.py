"""CPU rule of `ops.AllToAll`."""

from collections.abc import Sequence

import torch

from mla_fx.payload import pack


def rule(operands: Sequence[tuple[torch.Tensor, torch.Tensor]], *, ranks: int) -> list[tuple[torch.Tensor]]:
    """Every rank packs for all; rank r gets the r-th part of each, in the order of the sources."""
    sent = [pack(out, lse, ranks=ranks) for out, lse in operands]
    return [(torch.stack(parts),) for parts in zip(*sent, strict=True)]
