"""CPU rule of `ops.PermuteTokens`: one stable sort of the pairs by expert, this rank's first."""

import torch

from mla_fx.backends.device import Run
from mla_fx.effects import Group


def rule(
    x: torch.Tensor, experts: torch.Tensor, *, run: Run, own: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs of other ranks sort behind as expert number `own`; their rows are left as they come."""
    local = experts.flatten().to(torch.int64) - run.rank * own
    local.masked_fill_((local < 0) | (local >= own), own)
    order = local.argsort(stable=True)
    counts = torch.bincount(local, minlength=own + 1)[:own]
    mine = order[: int(counts.sum())]
    rows = x.new_empty(len(order), x.shape[1])
    torch.index_select(x, 0, mine // experts.shape[1], out=rows[: len(mine)])
    source = torch.full((len(order),), -1, dtype=torch.int32)
    source[mine] = torch.arange(len(mine), dtype=torch.int32)
    return rows, counts.clone(), source.view_as(experts)
