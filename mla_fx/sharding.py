"""Decode context parallelism: which rank owns which position, and in which row of its cache.

    owner(p)   = (p // I) % W
    local(S,r) = S // (I W) * I + clamp(S mod (I W) - r I, 0, I)

A block of the table stands for W * block_size positions, block_size on each
rank.  Within it, position off = p mod (W * block_size) lies in row

    off // (W I) * I + off mod I       of the owner's block.

History and current part are split by position, so a rank's history length is
local(total - new), never local(total) - something.
Source: vLLM's `cp_kv_cache_interleave_size` and its slot mapping.
"""

from collections.abc import Sequence

import torch
from attrs import field, frozen

from mla_fx.effects.validate import InputError, integer


@frozen(kw_only=True)
class Sharding:
    """How a sequence is laid over the ranks of a group and the blocks of their caches.

    >>> Sharding(ranks=2, interleave=4, block_size=4).local_lengths(5)
    (4, 1)
    """

    ranks: int = field(default=1, validator=integer(1))
    interleave: int = field(default=1, validator=integer(1))
    block_size: int = field(default=128, validator=integer(1))

    def __attrs_post_init__(self) -> None:
        if self.block_size % self.interleave:
            raise InputError(f"interleave: must divide block_size, {self.block_size}: got {self.interleave}")

    def owner(self, position: int) -> int:
        """The rank whose cache holds `position`."""
        return position // self.interleave % self.ranks

    def local_lengths(self, length: int) -> tuple[int, ...]:
        """How many of the first `length` positions each rank owns."""
        if length < 0:
            raise InputError(f"length: must be at least 0: got {length}")
        whole, rest = divmod(length, self.interleave * self.ranks)
        size = self.interleave
        return tuple(whole * size + min(max(rest - r * size, 0), size) for r in range(self.ranks))

    def blocks(self, length: int) -> int:
        """Blocks of the table that a request of `length` positions needs."""
        return -(-length // (self.block_size * self.ranks))

    def slots(self, positions: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        """Cache rows of new tokens, for every rank.

        `positions` int64 [T] and, for each, `rows` int64 [T], the block id that
        the table gives for `positions // (W * block_size)`.  Returns W tensors
        int64 [T]: block id * block_size + row for the owner, -1 for the others.
        """
        offset = positions % (self.block_size * self.ranks)
        owner = offset // self.interleave % self.ranks
        row = offset // (self.ranks * self.interleave) * self.interleave + offset % self.interleave
        slot = rows * self.block_size + row
        return [torch.where(owner == rank, slot, -1) for rank in range(self.ranks)]


def positions_of(history: Sequence[int], query: Sequence[int]) -> list[int]:
    """Absolute positions of the new tokens, request after request.

    >>> positions_of([5, 0], [2, 3])
    [5, 6, 0, 1, 2]
    """
    return [start + i for start, new in zip(history, query, strict=True) for i in range(new)]
