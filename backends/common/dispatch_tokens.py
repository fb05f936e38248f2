"""Both halves of `ops.DispatchTokens`: a token's features, weights and experts go as one row of bytes."""

import torch

from mla_fx.backends.common.ways import Ways, lanes, split
from mla_fx.backends.device import Run
from mla_fx.effects import Group


def send(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, *, run: Run, own: int, group: Group, among: Group
) -> tuple[torch.Tensor, list[int]]:
    """Rows for each rank, one behind the other, and how many these are."""
    ways = Ways.of(experts, run.rank, own=own, group=group, among=among)
    tokens = ways.tokens.to(x.device)
    return torch.cat([lanes(one.index_select(0, tokens)) for one in (x, weights, experts)], 1), ways.counts


def receive(
    moved: tuple[torch.Tensor, list[int]],
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    *,
    run: Run,
    own: int,
    group: Group,
    among: Group,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What has come stands first."""
    brought, counts = moved
    rows, room = brought.shape[0], group.size * among.share(x.shape[0])
    others = (run.rank + 1) % group.size * own
    results = (
        x.new_empty(room, x.shape[1]),
        weights.new_zeros(room, weights.shape[1]),
        experts.new_full((room, experts.shape[1]), others),
    )
    for result, part in zip(results, split(brought, (x, weights, experts)), strict=True):
        result[:rows] = part
    return *results, torch.tensor(counts, dtype=torch.int64).to(x.device)
