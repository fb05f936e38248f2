"""CPU rule of `ops.WriteCache`."""

import torch


def rule(
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the rows whose slot is not -1, in place."""
    mine = (slots >= 0).nonzero().squeeze(1)
    if mine.shape[0]:
        rows = slots[mine]
        _write(latent_cache, rows, latent[mine])
        _write(rope_cache, rows, k_rope[mine])
    return latent_cache, rope_cache


def _write(cache: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    _, size, features = cache.shape
    if cache.is_contiguous():
        cache.view(-1, features).index_copy_(0, rows, values)
    else:
        cache[rows // size, rows % size] = values
