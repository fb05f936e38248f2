"""Rule of `ops.ExpandedAttention`: request by request, a tile of queries at a time over the keys up to its last.

So of the square of pairs, half of which the mask hides, little more than the
other half is computed, and no more of it is ever there than a tile.
"""

import math

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
    tokens, heads, rope = q_rope.shape
    every, nope, _ = w_uk.shape
    kind = wide(q.dtype)
    q = own_heads(q.reshape(tokens, every, nope + rope)[..., :nope], heads, 1, run)
    up_k, up_v = (own_heads(part, heads, 0, run).to(kind) for part in (w_uk, w_uv))
    cur = q.new_zeros((tokens, heads, w_uv.shape[2]))
    lse = q.new_full((tokens, heads), -math.inf, dtype=kind)
    end = 0
    for length in query_lengths:
        start, end = end, end + length
        if not length:
            continue
        keys, ropes = (part[start:end].to(kind).expand(heads, -1, -1) for part in (latent, k_rope))
        k, v = torch.cat([torch.bmm(keys, up_k.mT), ropes], 2), torch.bmm(keys, up_v)
        for first in range(start, end, TILE):
            last = min(first + TILE, end)
            queries = torch.cat([q[first:last], q_rope[first:last]], 2).to(kind).transpose(0, 1)
            scores = torch.bmm(queries, k[:, : last - start].mT).mul_(scale)
            seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril_(first - start)
            scores.masked_fill_(~seen, -math.inf)
            cur[first:last] = torch.bmm(scores.softmax(2), v[:, : last - start]).transpose(0, 1)
            lse[first:last] = scores.logsumexp(2).t()
    return cur, lse
