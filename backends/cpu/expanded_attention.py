"""CPU rule of `ops.ExpandedAttention`: products of `products.of_heads`, some heads, queries and keys at a time.

Keys are expanded feature by feature, [N, P + R, m], so that scores are a
product of the queries with them as they lie.  A tile's scores stay in the
cache between the products.  With 16 heads of 192 and 128 features this took
0.6 to 0.7 of the time of torch's flash kernel for CPUs, on one core with AVX2.
"""

import math
from collections.abc import Iterator
from typing import Final

import torch
from attrs import frozen

from mla_fx.backends.common import expanded_attention as shared
from mla_fx.backends.cpu.products import PANEL, of_heads
from mla_fx.backends.device import Run
from mla_fx.effects import Group

#: Queries and heads of a tile: with 1024 keys, scores of 2 MiB in float32.
QUERIES: Final = 128
HEADS: Final = 4


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
    return shared.by_request(one, q, q_rope, latent, k_rope, w_uk, w_uv, query_lengths, run=run, scale=scale)


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
    """As the shared rule's, some heads at a time."""
    for some in parts(queries.shape[1], HEADS):
        keys = expanded(latent, k_rope, up_k[some], up_v[some])
        cur[:, some], lse[:, some] = attend(queries[:, some], keys, scale=scale, causal=True)


@frozen(eq=False)
class Keys:
    """Expanded keys `k` [N, P + R, M] and values `v` [N, M, V] of some heads, M being `count` rounded up to panels.

    Behind `count` both are zero.
    """

    k: torch.Tensor
    v: torch.Tensor
    count: int


def expanded(latent: torch.Tensor, k_rope: torch.Tensor, up_k: torch.Tensor, up_v: torch.Tensor) -> Keys:
    """Of `latent` [m, L] and `k_rope` [m, R], by `up_k` [N, P, L] and `up_v` [N, L, V]."""
    count, heads, nope = len(latent), *up_k.shape[:2]
    room = -(-count // PANEL) * PANEL
    # Features of a panel more, so that those of a head do not all lie in the same sets of the cache.
    k = latent.new_empty(heads, nope + k_rope.shape[1], room + PANEL)[..., :room]
    v = latent.new_empty(heads, room, up_v.shape[2] + PANEL)[..., : up_v.shape[2]]
    of_keys = latent.new_zeros(latent.shape[1], room)
    of_keys[:, :count] = latent.t()
    of_heads([up_k.transpose(0, 1)], [of_keys.expand(heads, -1, -1)], [k[:, :nope].transpose(0, 1)])
    k[:, nope:, :count] = k_rope.t()
    k[:, nope:, count:] = 0
    of_heads([latent.unsqueeze(1).expand(-1, heads, -1)], [up_v], [v[:, :count].transpose(0, 1)])
    v[:, count:] = 0
    return Keys(k, v, count)


def attend(q: torch.Tensor, keys: Keys, *, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`q` [n, N, P + R] over keys and values -> output [n, N, V] and natural LSE [n, N]; n and m are at least 1.

    `causal`: query i takes the keys up to i.
    """
    out, lse = q.new_empty(*q.shape[:2], keys.v.shape[2]), q.new_empty(q.shape[:2])
    for rows in parts(len(q), QUERIES):
        seen = min(rows.stop, len(q)) if causal else keys.count
        room = -(-seen // PANEL) * PANEL
        (scores,) = of_heads([q[rows] * scale], [keys.k[..., :room]])
        scores[..., seen:] = -math.inf
        if causal:
            last = scores[..., rows.start : seen]
            late = torch.ones(last.shape[0], last.shape[2], dtype=torch.bool, device=q.device).triu_(1)
            last.masked_fill_(late.unsqueeze(1), -math.inf)
        top = scores.amax(2)
        weights = scores.sub_(top.unsqueeze(2)).exp_()
        total = weights.sum(2)
        (part,) = of_heads([weights], [keys.v[:, :room]])
        torch.div(part, total.unsqueeze(2), out=out[rows])
        torch.add(top, total.log_(), out=lse[rows])
    return out, lse


def parts(count: int, step: int) -> Iterator[slice]:
    """All of so many, in steps."""
    return (slice(first, first + step) for first in range(0, count, step))
