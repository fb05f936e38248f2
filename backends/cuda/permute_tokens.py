"""CUDA rule of `ops.PermuteTokens`: one stable sort of the pairs by expert, this rank's first.

How many pairs are this rank's is known on the device only, so all of them are
moved: the rows of the others come to lie behind, where anything may lie.
"""

import torch

from mla_fx.backends.device import Run
from mla_fx.effects import Group


def rule(
    x: torch.Tensor, experts: torch.Tensor, *, run: Run, own: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs of other ranks sort behind as expert number `own`."""
    local = experts.flatten().to(torch.int64) - run.rank * own
    local.masked_fill_((local < 0) | (local >= own), own)
    ordered, order = local.sort(stable=True)
    rows = x.index_select(0, torch.floor_divide(order, experts.shape[1]))
    # Sorted, the pairs of an expert start where the first number not below its own is found.
    starts = torch.searchsorted(ordered, torch.arange(own + 1, device=local.device))
    counts = starts[1:] - starts[:-1]
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=local.device))
    source = place.masked_fill_(local == own, -1).to(torch.int32)
    return rows, counts, source.view(experts.shape)
