"""Which tokens go to which rank: worked out on the host from the experts that were chosen, for dispatch and combine."""

from typing import Any

import torch
from attrs import frozen

from mla_fx.effects import Group


@frozen(eq=False)
class Ways:
    """Of the tokens `mine`, this rank's share, all on the host.

    `tokens` int64 [n] are their numbers, rank after rank that they go to, and `counts` how many go to each rank;
    `places` int64 [K, share] says where each of the share stands in `tokens`, in rank order, and n behind that.
    """

    mine: slice
    tokens: torch.Tensor
    counts: list[int]
    places: torch.Tensor

    @classmethod
    def of(cls, experts: torch.Tensor, rank: int, *, own: int, group: Group, among: Group) -> "Ways":
        """The ways of `experts` [T, U]; the host waits for them.  `rank` is that in `group`."""
        mine = among.part(experts.shape[0], rank % among.size)
        chosen = experts[mine].cpu().to(torch.int64) // own
        goes = torch.zeros(group.size, chosen.shape[0], dtype=torch.bool)
        goes.T.scatter_(1, chosen, True)
        _, tokens = goes.nonzero(as_tuple=True)
        places = torch.full(goes.shape, len(tokens))
        places[goes] = torch.arange(len(tokens))
        most = int(goes.sum(0).max()) if goes.numel() else 0
        return cls(mine, tokens + mine.start, goes.sum(1).tolist(), places.sort(0).values[:most])


def lanes(tensor: torch.Tensor) -> torch.Tensor:
    """Rows as bytes."""
    return tensor.contiguous().view(torch.uint8)


def split(rows: torch.Tensor, like: Any) -> list[torch.Tensor]:
    """Rows of bytes taken apart again, into those of tensors `like` these."""
    parts, first = [], 0
    for one in like:
        width = one.shape[1] * one.element_size()
        own = rows[:, first : first + width].clone(memory_format=torch.contiguous_format)
        parts.append(own.view(one.dtype))
        first += width
    return parts
