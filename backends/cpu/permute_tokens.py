"""CPU rule of `ops.PermuteTokens`: the pairs sorted by expert, as they come within one."""

import torch

from mla_fx.backends.cpu.kernel import function
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.device import Run
from mla_fx.effects import Group


def rule(
    x: torch.Tensor, experts: torch.Tensor, *, run: Run, own: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of pairs of other ranks, behind the others, are left as they come."""
    if not takes(x, experts):
        return plain(x, experts, first=run.rank * own, own=own)
    tokens, top = experts.shape
    rows, source = x.new_empty(tokens * top, x.shape[1]), torch.empty_like(experts)
    counts, begins = torch.empty(own, dtype=torch.int64), torch.empty(own, dtype=torch.int64)
    results = rows.data_ptr(), counts.data_ptr(), begins.data_ptr(), source.data_ptr()
    size = x.element_size()
    given = x.data_ptr(), x.stride(0) * size, experts.data_ptr(), run.rank * own, own
    function("mla_fx_permute", "plpllpppplll")(*given, *results, tokens, top, x.shape[1] * size)
    return rows, counts, source


def plain(
    x: torch.Tensor, experts: torch.Tensor, *, first: int, own: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One stable sort: pairs of other ranks are behind, as expert number `own`."""
    local = experts.flatten().to(torch.int64) - first
    local.masked_fill_((local < 0) | (local >= own), own)
    order = local.argsort(stable=True)
    counts = torch.bincount(local, minlength=own + 1)[:own]
    mine = order[: int(counts.sum())]
    rows = x.new_empty(len(order), x.shape[1])
    torch.index_select(x, 0, mine // experts.shape[1], out=rows[: len(mine)])
    source = torch.full((len(order),), -1, dtype=torch.int32)
    source[mine] = torch.arange(len(mine), dtype=torch.int32)
    return rows, counts.clone(), source.view_as(experts)
