"""A value of several ranks as one object, which rules for several ranks take and give: a sequence of an entry for each.

Between two steps through weights the caches hold nothing of Python and of torch,
and an object for each rank costs more than a small part of the work does.  So
results lie in one tensor, which is taken apart only for those who want an entry,
and what a compiled library asks of a value, where its entries lie, is found out
once.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch

#: Bytes of a line of the cache.
LINE = 64


class Several(Sequence[Any]):
    """Of every rank a tensor, or integers on the host: those `given`, or those of `whole` [ranks, ...].

    Nothing of it changes but what the tensors hold.
    """

    __slots__ = ("_addresses", "_alike", "_entries", "_first", "_lies", "_ranks", "_same", "whole")

    def __init__(self, given: Sequence[Any], whole: torch.Tensor | None = None) -> None:
        self.whole = whole
        self._entries = given
        self._ranks = len(given) if whole is None else len(whole)
        self._first: torch.Tensor | None = None
        self._alike: bool | None = None if whole is None else True
        self._same = False
        self._lies: tuple[int, int] | None = None

    @classmethod
    def of(cls, given: Sequence[Any]) -> "Several":
        """What is `given`, as one object."""
        return given if type(given) is Several else cls(given)

    @classmethod
    def same(cls, one: Any, ranks: int) -> "Several":
        """One for all of so many ranks."""
        made = cls((one,) * ranks)
        made._alike = made._same = True
        return made

    @classmethod
    def empty(cls, ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> "Several":
        """Memory for a result of each rank, on the host.

        Each begins at a line of the cache, as torch's own do: elsewhere its products take sums in another order.
        """
        strides, apart = [], 1
        for size in reversed(shape):
            strides.append(apart)
            apart *= size
        lanes = LINE // dtype.itemsize
        strides.append(-(-apart // lanes) * lanes)
        whole = torch.empty_strided((ranks, *shape), strides[::-1], dtype=dtype)
        made = cls((), whole)
        made._lies = whole.data_ptr(), strides[-1] * dtype.itemsize
        return made

    @property
    def alike(self) -> bool:
        """Whether all tensors lie as the first does."""
        if self._alike is None:
            self._alike = _alike(self._entries)
        return self._alike

    @property
    def lies(self) -> tuple[int, int]:
        """Where the first tensor lies and how many bytes further the next; or where addresses of all lie, and -1."""
        if self._lies is None and self.whole is not None:
            self._lies = self.whole.data_ptr(), self.whole.stride(0) * self.whole.itemsize
        elif self._lies is None and self._same:
            self._lies = self._entries[0].data_ptr(), 0
        elif self._lies is None:
            self._addresses = array("q", [one if type(one) is int else one.data_ptr() for one in self._entries])
            self._lies = self._addresses.buffer_info()[0], -1
        return self._lies

    def __len__(self) -> int:
        return self._ranks

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> "Several": ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return Several(self._entries[at]) if self.whole is None else Several((), self.whole[at])
        if at or self.whole is None:
            return self._all()[at]
        if self._first is None:  # which is asked for how all lie
            self._first = self.whole[0]
        return self._first

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all())

    def _all(self) -> Sequence[Any]:
        if self.whole is not None and not self._entries:
            self._entries = self.whole.unbind()
        return self._entries


def _alike(given: Sequence[Any]) -> bool:
    if not isinstance(given[0], torch.Tensor) or given[0].layout is not torch.strided:
        return True  # integers, or what a library has packed and alone knows how
    return all([one.is_contiguous() for one in given]) or len({one.stride() for one in given}) == 1


def side_by_side(of: Sequence[torch.Tensor]) -> torch.Tensor:
    """Every rank's tensor in one, [ranks, ...]; it may be that in which they lie."""
    return of.whole if isinstance(of, Several) and of.whole is not None else torch.stack(list(of))
