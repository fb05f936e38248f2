"""CPU rule of `ops.PermuteTokens`: the pairs sorted by expert, as they come within one."""

from collections.abc import Sequence

import torch

from mla_fx.backends.cpu.kernel import Tensors, function, room
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.device import Run
from mla_fx.effects import Group


def several(x: Tensors, experts: Tensors, *, runs: Sequence[Run], own: int, group: Group) -> Sequence[Tensors]:
    """Rows of pairs of other ranks, behind the others, are left as they come."""
    firsts = [run.rank * own for run in runs]
    if not takes(x[0], experts[0]):
        return list(zip(*[plain(*mine, own=own) for mine in zip(x, experts, firsts, strict=True)], strict=True))
    first, (tokens, top) = x[0], experts[0].shape
    size = first.element_size()
    rows, sources = room(x, tokens * top, first.shape[1]), room(experts, tokens, top)
    counts = room(x, own, dtype=torch.int64)
    permute, sizes = (
        function("mla_fx_permute", "iiiii"),
        (first.stride(0) * size, own, tokens, top, first.shape[1] * size),
    )
    permute((x, experts, firsts, rows, counts, sources), *sizes)
    return rows, counts, sources


def plain(
    x: torch.Tensor, experts: torch.Tensor, first: int, *, own: int
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
