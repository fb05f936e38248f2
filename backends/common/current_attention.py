"""Rule of `ops.CurrentAttention`: requests of equal length that follow each other go together.

Where every request has one new token, the common step, that is one group, and
softmax over one key is no work: the output is the latent, the LSE the score.
"""

import math
from itertools import groupby

import torch

from mla_fx.backends.device import Run
from mla_fx.dtypes import wide

#: Tokens widened at a time: on the host what stays in its caches, on a device what fills it.
HOST_TOKENS, TOKENS = 64, 256


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
    """Scores, softmax and accumulation in float32 (float64 beside float64); result in the query dtype."""
    tokens = TOKENS if run.device.has_streams else HOST_TOKENS
    kind = wide(q_latent.dtype)
    cur = q_latent.new_zeros(q_latent.shape)
    lse = q_latent.new_full(q_latent.shape[:2], -math.inf, dtype=kind)
    end = 0
    for length, group in groupby(query_lengths):
        start, end = end, end + length * len(list(group))
        step = max(tokens // length, 1) * length if length else 1
        for first in range(start, end, step):
            rows = slice(first, min(first + step, end))
            keys, ropes = (part[rows].to(kind).reshape(-1, length, part.shape[1]) for part in (latent, k_rope))
            q, r = (part[rows].to(kind).reshape(len(keys), -1, part.shape[2]) for part in (q_latent, q_rope))
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
    future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu_(1)
    scores.view(scores.shape[0], length, -1, length).masked_fill_(future.unsqueeze(1), -math.inf)
