"""Both halves of `ops.CombineTokens`: rows go back where they came from, and are added in rank order."""

import torch

from mla_fx.backends.common.ways import Ways
from mla_fx.backends.device import Run
from mla_fx.dtypes import wide
from mla_fx.effects import Group


def send(
    rows: torch.Tensor, experts: torch.Tensor, counts: torch.Tensor, *, run: Run, own: int, group: Group, among: Group
) -> tuple[torch.Tensor, list[int]]:
    """Rank after rank, as many as it has sent."""
    back = counts.tolist()
    return rows[: sum(back)].contiguous(), back


def receive(
    moved: tuple[torch.Tensor, list[int]],
    rows: torch.Tensor,
    experts: torch.Tensor,
    counts: torch.Tensor,
    *,
    run: Run,
    own: int,
    group: Group,
    among: Group,
) -> tuple[torch.Tensor]:
    """The sum of what has come back for each token; a row of zeros stands for what it was not sent to."""
    ways = Ways.of(experts, run.rank, own=own, group=group, among=among)
    back = torch.cat([moved[0], rows.new_zeros(1, rows.shape[1])])
    total = rows.new_zeros(ways.places.shape[1], rows.shape[1], dtype=wide(rows.dtype))
    for place in ways.places:
        total.add_(back.index_select(0, place.to(rows.device)))
    out = rows.new_zeros(experts.shape[0], rows.shape[1])
    out[ways.mine] = total.to(rows.dtype)
    return (out,)
