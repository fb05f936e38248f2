"""CUDA rule of `ops.WriteRows`.

Selecting the rows whose slot is not -1 would need their number on the host.
So every token writes: one without a slot writes again what the token with the
highest slot does, the same bits to the same place.  Where no token has a slot,
all write what the first row of the cache holds already.
"""

import torch

from mla_fx.backends.device import Run


def rule(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Copy the rows whose slot is not -1, in place."""
    tokens, size = slots.shape[0], cache.shape[1]
    if tokens:
        token = torch.where(slots >= 0, torch.arange(tokens, device=slots.device), slots.argmax())
        slot = slots.index_select(0, token)
        nowhere = (slot < 0).unsqueeze(1)  # all of them, or none
        slot = slot.clamp_min(0)
        place = (torch.floor_divide(slot, size), torch.remainder(slot, size))
        cache.index_put_(place, torch.where(nowhere, cache[place], rows.index_select(0, token)))
    return (cache,)
