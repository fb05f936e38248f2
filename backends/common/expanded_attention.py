"""Rule of `ops.ExpandedAttention`: request by request, a tile of queries at a time over the keys up to its last.

So of the square of pairs, half of which the mask hides, little more than the
other half is computed, and no more of it is ever there than a tile.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from mla_fx.backends.common.local_heads import own_heads
from mla_fx.backends.device import Run
from mla_fx.dtypes import wide
from mla_fx.effects import Group

#: Queries of a tile.
TILE = 128


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
    """Keys, values, scores, softmax and accumulation in float32 (float64 beside float64); result in the query dtype."""
    operands, heads = (q, q_rope, latent, k_rope, w_uk, w_uv, query_lengths), q_rope.shape[1]
    return by_request(expanded, _of_request, heads, *operands, run=run, scale=scale)


def by_request(
    expand: Callable[..., Any],
    attend_to: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    at_once: int,
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule, by somebody's own functions, so many heads `at_once`.

    `expand` is called as `expanded` is, with the keys of all requests, since products of few keys each would read the
    weights for every request; `attend_to` as `_of_request` is, with what that gave and the rows of one request.
    """
    tokens, heads, rope = q_rope.shape
    every, nope, _ = w_uk.shape
    kind, end = wide(q.dtype), sum(query_lengths)
    q = own_heads(q.reshape(tokens, every, nope + rope)[..., :nope], heads, 1, run)
    cur = q.new_zeros((tokens, heads, w_uv.shape[2]))
    lse = q.new_full((tokens, heads), -math.inf, dtype=kind)
    if not end:
        return cur, lse
    up_k, up_v = (own_heads(part, heads, 0, run).to(kind) for part in (w_uk, w_uv))
    queries, latent, k_rope = torch.cat([q, q_rope], 2).to(kind), latent[:end].to(kind), k_rope[:end].to(kind)
    for first in range(0, heads, at_once):
        some = slice(first, first + at_once)
        keys, last = expand(latent, k_rope, up_k[some], up_v[some]), 0
        for length in query_lengths:
            rows, last = slice(last, last + length), last + length
            if length:
                cur[rows, some], lse[rows, some] = attend_to(queries[rows, some], keys, rows, scale)
    return cur, lse


def _of_request(
    q: torch.Tensor, keys: tuple[torch.Tensor, torch.Tensor], rows: slice, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`q` [n, N, P + R] over the keys and values of the same `rows` -> output [n, N, V] and natural LSE [n, N]."""
    k, v = (part[:, rows] for part in keys)
    out, lse = attend(q.transpose(0, 1), k, v, scale=scale, causal=True)
    return out.transpose(0, 1), lse.t()


def expanded(
    latent: torch.Tensor, k_rope: torch.Tensor, up_k: torch.Tensor, up_v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [N, m, P + R] and values [N, m, V] of `latent` [m, L] and `k_rope` [m, R]: see `ops.ExpandedAttention`."""
    keys, ropes = (part.expand(len(up_k), -1, -1) for part in (latent, k_rope))
    return torch.cat([torch.bmm(keys, up_k.mT), ropes], 2), torch.bmm(keys, up_v)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`q` [N, n, F], `k` [N, m, F], `v` [N, m, V] -> output [N, n, V] and natural LSE [N, n].

    `causal`: query i takes the keys up to i.
    """
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2])
    for first in range(0, q.shape[1], TILE):
        last = min(first + TILE, q.shape[1])
        seen = last if causal else k.shape[1]
        scores = torch.bmm(q[:, first:last], k[:, :seen].mT).mul_(scale)
        if causal:
            mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril_(first)
            scores.masked_fill_(~mask, -math.inf)
        out[:, first:last] = torch.bmm(scores.softmax(2), v[:, :seen])
        lse[:, first:last] = scores.logsumexp(2)
    return out, lse
