"""Reference rule of `ops.CurrentAttention`."""

import math

import torch
from torch.func import vmap

from mla_fx.backends.device import Run


def rule(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    query_lengths: tuple[int, ...],
    *,
    run: Run,
    scale: float,
    workspace: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The i-th token of a request attends to its tokens 0..i; padding tokens get 0 and -inf."""
    cur = q_latent.new_zeros(q_latent.shape)
    lse = q_latent.new_full(q_latent.shape[:2], -math.inf)

    def head(q_latent: torch.Tensor, q_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = scale * (latent[seen] @ q_latent + k_rope[seen] @ q_rope)
        lse = torch.logsumexp(s, 0)
        return torch.exp(s - lse) @ latent[seen], lse

    start = 0
    for queries in query_lengths:
        for t in range(start, start + queries):
            seen = slice(start, t + 1)
            cur[t], lse[t] = vmap(head)(q_latent[t], q_rope[t])
        start += queries
    return cur, lse
