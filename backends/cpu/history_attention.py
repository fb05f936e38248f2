"""CPU rule of `ops.HistoryAttention`: online softmax over tiles of the shard.

With the tiles' scores s, running maximum m, sum z and accumulator a,

    m' = max(m, max_j s[j])     p[j] = exp(s[j] - m')     f = exp(m - m')
    z' = f z + sum_j p[j]       a' = f a + sum_j p[j] c[j]
    hist = a / z                lse = m + log z

All heads of all tokens of a request are the rows of one matrix product.
Source: online softmax (Milakov and Gimelshein, arXiv 1805.02867), FlashAttention.
"""

import math
from collections.abc import Iterator

import torch

#: Keys in a tile: latent and rope of so many, in float32, stay in a core's L2 cache between the two products.
TILE = 512


def rule(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_lengths: tuple[int, ...],
    history_lengths: tuple[int, ...],
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, softmax and accumulation in float32 (float64 beside float64); result in the query dtype."""
    tokens, heads, latent = q_latent.shape
    wide = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    hist = q_latent.new_zeros(q_latent.shape)
    lse = q_latent.new_full((tokens, heads), -math.inf, dtype=wide)
    end, size = 0, latent_cache.shape[1]
    for b, (queries, keys) in enumerate(zip(query_lengths, history_lengths, strict=True)):
        start, end = end, end + queries
        if queries and keys:
            table = block_table[b, : -(-keys // size)]
            q, r = (part[start:end].flatten(0, 1).to(wide) for part in (q_latent, q_rope))
            latents, ropes = (_tiles(cache, table, keys, wide) for cache in (latent_cache, rope_cache))
            total, peak, summed = _attend(q, r, zip(latents, ropes, strict=True), scale)
            hist[start:end].view(-1, latent).copy_(summed.div_(total))
            lse[start:end].view(-1, 1).copy_(total.log_().add_(peak))
    return hist, lse


def _attend(
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


def _tiles(cache: torch.Tensor, table: torch.Tensor, keys: int, wide: torch.dtype) -> Iterator[torch.Tensor]:
    """The first `keys` rows of the blocks in `table`, as [n, features] of dtype `wide`, n at most a tile.

    A view of the cache where blocks follow each other and nothing is to be
    widened; else one buffer, so a tile is used before the next is asked for.
    """
    _, size, features = cache.shape
    blocks, step = table.tolist(), max(1, TILE // size)
    gathered = cache.new_empty(min(step, len(blocks)), size, features)
    widened = gathered if cache.dtype == wide else torch.empty_like(gathered, dtype=wide)
    for at in range(0, len(blocks), step):
        some = blocks[at : at + step]
        first, count = some[0], len(some)
        if some == list(range(first, first + count)):
            rows = cache[first : first + count]
        else:
            rows = torch.index_select(cache, 0, table[at : at + step], out=gathered[:count])
        if cache.dtype != wide:
            rows = widened[:count].copy_(rows)
        yield rows.flatten(0, 1)[: keys - at * size]
