"""Reference rule of `ops.ExpandedAttention`."""

import math

import torch
from torch.func import vmap

from mla_fx.backends.device import Run
from mla_fx.effects import Group


def rule(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    query_lengths: tuple[int, ...],
    *,
    run: Run,
    scale: float,
    group: Group | None,
    workspace: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The i-th token of a request attends to its tokens 0..i; padding tokens get 0 and -inf."""
    tokens, heads, rope = q_rope.shape
    every, nope, _ = w_uk.shape
    q, w_uk, w_uv = (
        part if len(part) == heads else part[run.rank * heads : (run.rank + 1) * heads]
        for part in (q.reshape(tokens, every, nope + rope)[..., :nope].transpose(0, 1), w_uk, w_uv)
    )
    k, v = torch.einsum("npl,jl->njp", w_uk, latent), torch.einsum("jl,nlv->njv", latent, w_uv)
    cur = q.new_zeros((tokens, heads, v.shape[2]))
    lse = q.new_full((tokens, heads), -math.inf)

    def head(
        q: torch.Tensor, q_rope: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        s = scale * (k @ q + k_rope[seen] @ q_rope)
        lse = torch.logsumexp(s, 0)
        return torch.exp(s - lse) @ v, lse

    start = 0
    for queries in query_lengths:
        for t in range(start, start + queries):
            seen = slice(start, t + 1)
            cur[t], lse[t] = vmap(head)(q[:, t], q_rope[t], k[:, seen], v[:, seen])
        start += queries
    return cur, lse
