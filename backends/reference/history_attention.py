"""Reference rule of `ops.HistoryAttention`."""

import math

import torch
from torch.func import vmap

from mla_fx.backends.device import Run


def rule(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_lengths: tuple[int, ...],
    history_lengths: tuple[int, ...],
    *,
    run: Run,
    scale: float,
    workspace: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token of a request attends to the `history_lengths[b]` rows of its shard; none: 0 and -inf."""
    hist = q_latent.new_zeros(q_latent.shape)
    lse = q_latent.new_full(q_latent.shape[:2], -math.inf)

    def head(q_latent: torch.Tensor, q_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = scale * (c @ q_latent + k_rope @ q_rope)
        lse = torch.logsumexp(s, 0)
        return torch.exp(s - lse) @ c, lse

    end, size = 0, latent_cache.shape[1]
    for b, (queries, keys) in enumerate(zip(query_lengths, history_lengths, strict=True)):
        start, end = end, end + queries
        if queries and keys:
            j = torch.arange(keys)
            block = block_table[b, j // size].long()
            c, k_rope = latent_cache[block, j % size], rope_cache[block, j % size]
            hist[start:end], lse[start:end] = vmap(vmap(head))(q_latent[start:end], q_rope[start:end])
    return hist, lse
