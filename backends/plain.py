"""What several backends compute alike, in torch that runs on any device and waits for none.

Attention in float32 (float64 beside float64), with the tiles' scores s, running
maximum m, sum z and accumulator a,

    m' = max(m, max_j s[j])     p[j] = exp(s[j] - m')     f = exp(m - m')
    z' = f z + sum_j p[j]       a' = f a + sum_j p[j] c[j]
    hist = a / z                lse = m + log z

Source: online softmax (Milakov and Gimelshein, arXiv 1805.02867), FlashAttention.
"""

import math
from collections.abc import Iterator
from itertools import groupby

import torch

from mla_fx.dtypes import wide


def attend_tiles(
    q: torch.Tensor, q_rope: torch.Tensor, tiles: Iterator[tuple[torch.Tensor, torch.Tensor]], scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """z [rows, 1], m [rows, 1], a [rows, L] after the last tile, for `q` [rows, L] and `q_rope` [rows, R]."""
    c, k_rope = next(tiles)
    p = _scores(q, q_rope, c, k_rope, scale)
    peak = p.amax(1, keepdim=True)
    p.sub_(peak).exp_()
    total, summed = p.sum(1, keepdim=True), torch.mm(p, c)
    for c, k_rope in tiles:
        p = _scores(q, q_rope, c, k_rope, scale)
        higher = torch.maximum(peak, p.amax(1, keepdim=True))
        p.sub_(higher).exp_()
        shrink = peak.sub_(higher).exp_()
        total.mul_(shrink).add_(p.sum(1, keepdim=True))
        summed.mul_(shrink).addmm_(p, c)
        peak = higher
    return total, peak, summed


def _scores(q: torch.Tensor, q_rope: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.mm(q, c.t()).addmm_(q_rope, k_rope.t(), beta=scale, alpha=scale)


def attend_new(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    query_lengths: tuple[int, ...],
    *,
    scale: float,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.CurrentAttention`: requests of equal length that follow each other go together, `tokens` at a time.

    Where every request has one new token, the common step, that is one group, and softmax over one key is no work:
    the output is the latent, the LSE the score.
    """
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


def drop_groups(s: torch.Tensor, *, groups: int, top_groups: int, group_score: str) -> torch.Tensor:
    """Scores `s` [T, X] of experts with all groups but the best `top_groups` at -inf.  See `ops.GatingTopK`."""
    if top_groups == groups:
        return s
    tokens, count = s.shape
    grouped = s.view(tokens, groups, count // groups)
    g = grouped.sort(dim=2, descending=True).values[..., :2].sum(2) if group_score == "top2" else grouped.amax(2)
    dropped = g.sort(dim=1, descending=True, stable=True).indices[:, top_groups:]
    return grouped.scatter(1, dropped.unsqueeze(2).expand(-1, -1, count // groups), -math.inf).view(tokens, count)
