"""Reference rule of `ops.WriteCache`."""

import torch


def rule(
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cache[slot // S, slot % S] = new[t] with slot = slots[t], in place; nothing where slot = -1."""
    size = latent_cache.shape[1]
    for t, slot in enumerate(slots.tolist()):
        if slot != -1:
            latent_cache[slot // size, slot % size] = latent[t]
            rope_cache[slot // size, slot % size] = k_rope[t]
    return latent_cache, rope_cache
