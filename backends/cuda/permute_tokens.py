"""CUDA rule of `ops.PermuteTokens`: one stable sort of the pairs by expert, this rank's first.

How many pairs are this rank's is known on the device only, so all of them are
moved: the rows of the others come to lie behind, where anything may lie.
"""

import torch


def rule(
    x: torch.Tensor, experts: torch.Tensor, *, own: int, ranks: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs of other ranks sort behind as expert number `own`."""
    local = experts.flatten().to(torch.int64) - rank * own
    local.masked_fill_((local < 0) | (local >= own), own)
    ordered, order = local.sort(stable=True)
    rows = x.index_select(0, torch.floor_divide(order, experts.shape[1]))
    # Sorted, the pairs of an expert start where the first number not below its own is found.
    starts = torch.searchsorted(ordered, torch.arange(own + 1, device=local.device))
    counts = starts[1:] - starts[:-1]
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=local.device))
    source = place.masked_fill_(local == own, -1).to(torch.int32)
    return rows, counts, source.view(experts.shape)
