"""CPU rule of `ops.CurrentAttention`: requests of equal length go together.

Where every request has one new token, the common step, that is one group, and
softmax over one key is no work: the output is the latent, the LSE the score.
"""

import math
from itertools import groupby

import torch

#: Tokens widened at a time.
TOKENS = 64


def rule(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    query_lengths: tuple[int, ...],
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, softmax and accumulation in float32 (float64 beside float64); result in the query dtype."""
    wide = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    cur = q_latent.new_zeros(q_latent.shape)
    lse = q_latent.new_full(q_latent.shape[:2], -math.inf, dtype=wide)
    end = 0
    for length, group in groupby(query_lengths):
        start, end = end, end + length * len(list(group))
        step = max(TOKENS // length, 1) * length if length else 1
        for first in range(start, end, step):
            rows = slice(first, min(first + step, end))
            keys, ropes = (part[rows].to(wide).view(-1, length, *part.shape[1:]) for part in (latent, k_rope))
            q, r = (part[rows].to(wide).view(-1, length, *part.shape[1:]).flatten(1, 2) for part in (q_latent, q_rope))
            scores = torch.bmm(q, keys.mT).baddbmm_(r, ropes.mT, beta=scale, alpha=scale)
            if length == 1:
                cur[rows] = latent[rows].unsqueeze(1)
                lse[rows] = scores.squeeze(2)
            else:
                _mask(scores, length)
                cur[rows] = torch.bmm(scores.softmax(2), keys).view(-1, *q_latent.shape[1:])
                lse[rows] = scores.logsumexp(2).view(-1, q_latent.shape[1])
    return cur, lse


def _mask(scores: torch.Tensor, length: int) -> None:
    """Set the scores [requests, length * N, length] of later tokens to -inf."""
    future = torch.ones(length, length, dtype=torch.bool).triu_(1)
    scores.view(scores.shape[0], length, -1, length).masked_fill_(future.unsqueeze(1), -math.inf)
