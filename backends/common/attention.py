"""Softmax over tiles of keys, for rules of `ops.HistoryAttention`: torch that runs on any device and waits for none.

In float32 (float64 beside float64), with a tile's scores s, running maximum m,
sum z and accumulator a,

    m' = max(m, max_j s[j])     p[j] = exp(s[j] - m')     f = exp(m - m')
    z' = f z + sum_j p[j]       a' = f a + sum_j p[j] c[j]
    hist = a / z                lse = m + log z

Source: online softmax (Milakov and Gimelshein, arXiv 1805.02867), FlashAttention.
"""

from collections.abc import Iterator

import torch


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
