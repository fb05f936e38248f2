"""CPU rule of `ops.WriteRows`."""

from collections.abc import Sequence

import torch

from mla_fx.backends.cpu.kernel import Tensors, engine, function
from mla_fx.backends.device import Run


def several(cache: Tensors, rows: Tensors, slots: Tensors, *, runs: Sequence[Run]) -> Sequence[Tensors]:
    """Copy the rows whose slot is not -1, in place."""
    if engine() is not None and all([one[0].is_contiguous() for one in (cache, rows, slots)]):
        first, count = cache[0], len(slots[0])
        function("mla_fx_write_rows", "ii")((cache, rows, slots), count, first.shape[2] * first.element_size())
    else:
        for mine in zip(cache, rows, slots, strict=True):
            plain(*mine)
    return (cache,)


def plain(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """The same by torch alone."""
    mine = (slots >= 0).nonzero().squeeze(1)
    if mine.shape[0]:
        places, size = slots[mine], cache.shape[1]
        if cache.is_contiguous():
            cache.view(-1, cache.shape[2]).index_copy_(0, places, rows[mine])
        else:
            cache[places // size, places % size] = rows[mine]
