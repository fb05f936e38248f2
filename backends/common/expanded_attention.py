"""Rule of `ops.ExpandedAttention`: request by request, a tile of queries at a time over the keys up to its last.

So of the square of pairs, half of which the mask hides, little more than the
other half is computed, and no more of it is ever there than a tile.
"""

import math
from collections.abc import Callable

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
    return by_request(one, q, q_rope, latent, k_rope, w_uk, w_uv, query_lengths, run=run, scale=scale)


def by_request(
    attend_to: Callable[..., None],
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
    """The rule, with attention of a request by somebody's own; it is called as `one` is."""
    tokens, heads, rope = q_rope.shape
    every, nope, _ = w_uk.shape
    kind = wide(q.dtype)
    q = own_heads(q.reshape(tokens, every, nope + rope)[..., :nope], heads, 1, run)
    ups = [own_heads(part, heads, 0, run).to(kind) for part in (w_uk, w_uv)]
    cur = q.new_zeros((tokens, heads, w_uv.shape[2]))
    lse = q.new_full((tokens, heads), -math.inf, dtype=kind)
    end = 0
    for length in query_lengths:
        start, end = end, end + length
        if length:
            rows = slice(start, end)
            queries = torch.cat([q[rows], q_rope[rows]], 2).to(kind)
            attend_to(queries, latent[rows].to(kind), k_rope[rows].to(kind), *ups, cur[rows], lse[rows], scale=scale)
    return cur, lse


def one(
    queries: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    up_k: torch.Tensor,
    up_v: torch.Tensor,
    cur: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Of one request, `queries` [n, N, P + R] and its own n keys, the output into `cur` [n, N, V] and `lse` [n, N]."""
    out, sums = attend(queries.transpose(0, 1), *expanded(latent, k_rope, up_k, up_v), scale=scale, causal=True)
    cur.copy_(out.transpose(0, 1))
    lse.copy_(sums.t())


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
