"""CUDA rule of `ops.HistoryAttention`: one request after the other, online softmax over tiles of its shard.

All heads of all tokens of a request are the rows of one matrix product; its
tiles are gathered by the block table and widened.  Which tiles there are
follows from the lengths, which are on the host.  Plain torch, a handful of
launches a tile: right on any GPU, and no rival of a fused kernel.
The softmax over tiles is `mla_fx.backends.common.attention`'s.

A captured program works on shapes alone: every token attends to all columns of
its request's row, and a mask takes out what its lengths do not reach.  So it
costs what a full table costs, T * M * S keys, whatever the lengths; a runner
captures programs with narrower tables for shorter contexts.
"""

import math
from collections.abc import Iterator

import torch

from mla_fx.backends.common.attention import attend_tiles
from mla_fx.backends.cuda.calls.owners import owners
from mla_fx.backends.device import Run
from mla_fx.dtypes import wide

#: Keys in a tile: latent and rope of so many take 9 MiB in float32, their scores 2 MiB for 128 heads of a token.
TILE = 4096


def rule(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_lengths: tuple[int, ...],
    history_lengths: tuple[int, ...],
    *,
    run: Run,
    scale: float,
    workspace: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, softmax and accumulation in float32 (float64 beside float64)."""
    kind, size = wide(q_latent.dtype), latent_cache.shape[1]
    hist = q_latent.new_zeros(q_latent.shape)
    lse = q_latent.new_full(q_latent.shape[:2], -math.inf, dtype=kind)
    end = 0
    for b, (queries, keys) in enumerate(zip(query_lengths, history_lengths, strict=True)):
        start, end = end, end + queries
        if queries and keys:
            table = block_table[b, : -(-keys // size)]
            q, r = (part[start:end].to(kind).flatten(0, 1) for part in (q_latent, q_rope))
            tiles = zip(*(_tiles(cache, table, keys, kind) for cache in (latent_cache, rope_cache)), strict=True)
            total, peak, summed = attend_tiles(q, r, tiles, scale)
            hist[start:end] = (summed / total).view(queries, *q_latent.shape[1:])
            lse[start:end] = (total.log() + peak).view(queries, -1)
    return hist, lse


def _tiles(cache: torch.Tensor, table: torch.Tensor, keys: int, kind: torch.dtype) -> Iterator[torch.Tensor]:
    """The first `keys` rows of the blocks in `table`, as [n, features] of dtype `kind`, n at most a tile or a block."""
    size = cache.shape[1]
    step = max(1, TILE // size)
    for at in range(0, table.shape[0], step):
        rows = cache.index_select(0, table[at : at + step]).flatten(0, 1)
        yield rows[: keys - at * size].to(kind)


def captured(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_lengths: torch.Tensor,
    history_lengths: torch.Tensor,
    *,
    run: Run,
    scale: float,
    workspace: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both lengths int64 [B] on the device; the rest as for `rule`."""
    kind, (blocks, size) = wide(q_latent.dtype), latent_cache.shape[:2]
    tokens, columns = q_latent.shape[0], block_table.shape[1]
    request, real = owners(query_lengths, tokens)
    keys = history_lengths.index_select(0, request).masked_fill(~real, 0)
    table = block_table.clamp(0, blocks - 1).index_select(0, request)  # behind the lengths there may be anything
    q, r = q_latent.to(kind), q_rope.to(kind)
    peak = q.new_full((*q.shape[:2], 1), -math.inf)
    total, summed = torch.zeros_like(peak), torch.zeros_like(q)
    step = max(1, TILE // max(1, size * tokens))
    for at in range(0, columns, step):
        part = table[:, at : at + step]
        place = torch.arange(at * size, at * size + part.shape[1] * size, device=q.device)
        hidden = place >= keys.unsqueeze(1)
        c, k = (
            cache.index_select(0, part.flatten()).view(tokens, -1, cache.shape[2]).to(kind)
            for cache in (latent_cache, rope_cache)
        )
        c = c.masked_fill(hidden.unsqueeze(2), 0)  # weight 0 does not wash out a NaN of whoever had the block before
        scores = torch.bmm(q, c.mT).baddbmm_(r, k.mT, beta=scale, alpha=scale)
        scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
        higher = torch.maximum(peak, scores.amax(2, keepdim=True))
        safe = higher.masked_fill(higher.isinf(), 0)
        p, shrink = (scores - safe).exp(), (peak - safe).exp()
        total, summed, peak = total * shrink + p.sum(2, keepdim=True), summed * shrink + torch.bmm(p, c), higher
    hist = (summed / total).masked_fill(total == 0, 0)
    return hist.to(q_latent.dtype), (total.log() + peak).squeeze(2)
