"""Distributed rule of `ops.AllToAll`."""

from typing import Any

import torch
import torch.distributed as dist

from mla_fx.payload import pack


def rule(out: torch.Tensor, lse: torch.Tensor, *, ranks: int, group: Any) -> tuple[torch.Tensor]:
    """One message: the packed part for rank r goes to rank r, as bytes; what comes lies in the order of the sources."""
    sent = pack(out, lse, ranks=ranks)
    recv = torch.empty_like(sent)
    if sent.numel():
        dist.all_to_all_single(recv.view(torch.uint8), sent.view(torch.uint8), group=group)
    return (recv,)
