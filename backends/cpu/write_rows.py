"""CPU rule of `ops.WriteRows`."""

import torch

from mla_fx.backends.device import Run


def rule(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Copy the rows whose slot is not -1, in place."""
    mine = (slots >= 0).nonzero().squeeze(1)
    if mine.shape[0]:
        places, size = slots[mine], cache.shape[1]
        if cache.is_contiguous():
            cache.view(-1, cache.shape[2]).index_copy_(0, places, rows[mine])
        else:
            cache[places // size, places % size] = rows[mine]
    return (cache,)
