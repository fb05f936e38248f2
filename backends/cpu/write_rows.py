"""CPU rule of `ops.WriteRows`."""

from collections.abc import Sequence

import torch

from mla_fx.backends.cpu.kernel import Tensors, engine, function
from mla_fx.backends.device import Run


def several(caches: Tensors, rows: Tensors, slots: Tensors, *, runs: Sequence[Run]) -> Sequence[Tensors]:
    """Copy the rows whose slot is not -1, in place."""
    if engine() is not None and all([one[0].is_contiguous() for one in (caches, rows, slots)]):
        cache, count = caches[0], len(slots[0])
        function("mla_fx_write_rows", "ii")((caches, rows, slots), count, cache.shape[2] * cache.element_size())
    else:
        for mine in zip(caches, rows, slots, strict=True):
            plain(*mine)
    return (caches,)


def plain(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """The same by torch alone."""
    mine = (slots >= 0).nonzero().squeeze(1)
    if mine.shape[0]:
        places, size = slots[mine], cache.shape[1]
        if cache.is_contiguous():
            cache.view(-1, cache.shape[2]).index_copy_(0, places, rows[mine])
        else:
            cache[places // size, places % size] = rows[mine]
