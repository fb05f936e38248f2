"""Reference rule of `ops.WriteRows`."""

import torch

from mla_fx.backends.device import Run


def rule(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """cache[slot // S, slot % S] = rows[t] with slot = slots[t], in place; nothing where slot = -1."""
    size = cache.shape[1]
    for t, slot in enumerate(slots.tolist()):
        if slot != -1:
            cache[slot // size, slot % size] = rows[t]
    return (cache,)
