"""CPU rule of `ops.WriteRows`."""

from collections.abc import Sequence

import torch

from mla_fx.backends.cpu.kernel import Tensors, engine, function
from mla_fx.backends.device import Run
from mla_fx.effects import InputError


def several(cache: Tensors, rows: Tensors, slots: Tensors, *, runs: Sequence[Run]) -> Sequence[Tensors]:
    """Copy the rows whose slot is not -1, in place."""
    if engine() is not None and all([one[0].is_contiguous() for one in (cache, rows, slots)]):
        first = cache[0]
        sizes = len(slots[0]), first.shape[0] * first.shape[1], first.shape[2] * first.element_size()
        refused = function("mla_fx_write_rows", "iii")((cache, rows, slots), *sizes)
        if refused is not None:
            token, rank = refused
            raise _behind(token, slots[rank], sizes[1])
    else:
        for mine in zip(cache, rows, slots, strict=True):
            plain(*mine)
    return (cache,)


def plain(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """The same by torch alone."""
    mine = (slots >= 0).nonzero().squeeze(1)
    if mine.shape[0]:
        places, size = slots[mine], cache.shape[1]
        if int(places.max()) >= len(cache) * size:
            raise _behind(int(slots.argmax()), slots, len(cache) * size)
        if cache.is_contiguous():
            cache.view(-1, cache.shape[2]).index_copy_(0, places, rows[mine])
        else:
            cache[places // size, places % size] = rows[mine]


def _behind(token: int, slots: torch.Tensor, size: int) -> InputError:
    return InputError(f"slots[{token}]: must be in -1..{size - 1}: got {int(slots[token])}")
