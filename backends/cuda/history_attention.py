"""CUDA rule of `ops.HistoryAttention`: one request after the other, online softmax over tiles of its shard.

All heads of all tokens of a request are the rows of one matrix product; its
tiles are gathered by the block table and widened.  Which tiles there are
follows from the lengths, which are on the host.  Plain torch, a handful of
launches a tile: right on any GPU, and no rival of a fused kernel.
The softmax over tiles is `mla_fx.backends.common.attention`'s.
"""

import math
from collections.abc import Iterator

import torch

from mla_fx.backends.common.attention import attend_tiles
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
