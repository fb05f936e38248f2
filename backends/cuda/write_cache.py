"""CUDA rule of `ops.WriteCache`.

Selecting the rows whose slot is not -1 would need their number on the host.
So every token writes: one without a slot writes again what the token with the
highest slot does, the same bits to the same place.  Where no token has a slot,
all write what the first row of the cache holds already.
"""

import torch


def rule(
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the rows whose slot is not -1, in place."""
    tokens, size = slots.shape[0], latent_cache.shape[1]
    if tokens:
        token = torch.where(slots >= 0, torch.arange(tokens, device=slots.device), slots.argmax())
        slot = slots.index_select(0, token)
        nowhere = (slot < 0).unsqueeze(1)  # all of them, or none
        slot = slot.clamp_min(0)
        place = (torch.floor_divide(slot, size), torch.remainder(slot, size))
        for cache, values in ((latent_cache, latent), (rope_cache, k_rope)):
            written = torch.where(nowhere, cache[place], values.index_select(0, token))
            cache.index_put_(place, written)
    return latent_cache, rope_cache
