"""What a graph leaves in memory between its replays, and which of it nobody may rely on.

What the operators of a graph write before any task of it has read it is worth nothing when a replay begins: the memory
of its intermediates and of its results, and of whatever else lay there.  It becomes NaN then, so that a read of the
replay before, of another graph of the same pool, or of what was never written shows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch
from attrs import define, field

from mla_fx.backends.ascend.emulator.operator import ends, spoil


@define(eq=False)
class Ranges:
    """Addresses, as disjoint ranges in order."""

    _begins: list[int] = field(factory=list)
    _ends: list[int] = field(factory=list)

    def add(self, begin: int, end: int) -> None:
        """And those from `begin` up to `end`."""
        if begin >= end:
            return
        first, behind = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < behind:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[behind - 1])
        self._begins[first:behind], self._ends[first:behind] = [begin], [end]

    def meet(self, begin: int, end: int) -> bool:
        """Whether any of them lies there."""
        first = bisect_right(self._ends, begin)
        return first < len(self._begins) and self._begins[first] < end


@define(eq=False)
class Stale:
    """Of one graph: tensors that are worth nothing when a replay of it begins."""

    _read: Ranges = field(factory=Ranges)
    _tensors: list[torch.Tensor] = field(factory=list)

    def protect(self, begin: int, bytes_: int) -> None:
        """Something else than an operator reads this, sooner or later."""
        self._read.add(begin, begin + bytes_)

    def runs(self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """The next operator in the order of capture."""
        for tensor in read:
            if tensor.numel():
                self._read.add(*ends(tensor))
        self._tensors += [tensor for tensor in written if tensor.numel() and not self._read.meet(*ends(tensor))]

    def spoil(self) -> None:
        """A replay begins."""
        for tensor in self._tensors:
            spoil(tensor)
