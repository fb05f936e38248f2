"""CPU rule of `ops.HistoryAttention`: the compiled kernel, or plain torch where there is none or in float64.

Plain, all heads of all tokens of a request are the rows of one matrix product,
and the softmax over tiles is `mla_fx.backends.common.attention`'s.  torch's own
flash kernel is no help: its exponential for 16 bits is a cubic, which puts the
LSE off by 1e-5 to 4e-5, and with AVX2 it takes 1.2 to 3 times as long as tiles.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from mla_fx.backends.common.attention import attend_tiles
from mla_fx.backends.cpu.kernel import Tensors, attention
from mla_fx.backends.cpu.kernel.attention import Lengths
from mla_fx.backends.device import Run
from mla_fx.dtypes import wide

#: Keys in a tile: latent and rope of so many, in float32, stay in a core's L2 cache between the two products.
TILE = 512


def several(
    q_latent: Tensors,
    q_rope: Tensors,
    latent_cache: Tensors,
    rope_cache: Tensors,
    block_table: Tensors,
    query_lengths: Lengths,
    history_lengths: Lengths,
    *,
    runs: Sequence[Run],
    scale: float,
    workspace: str,
) -> Sequence[Tensors]:
    """Scores, softmax and accumulation in float32 (float64 beside float64); result in the query dtype."""
    operands = (q_latent, q_rope, latent_cache, rope_cache, block_table, query_lengths, history_lengths)
    if attention.serves(q_latent[0], latent_cache[0], rope_cache[0]):
        return attention.history(*operands, scale)
    return list(zip(*[plain(*mine, scale=scale) for mine in zip(*operands, strict=True)], strict=True))


def plain(
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
    """The same by torch alone."""
    tokens, heads, latent = q_latent.shape
    kind = wide(q_latent.dtype)
    hist = q_latent.new_zeros(q_latent.shape)
    lse = q_latent.new_full((tokens, heads), -math.inf, dtype=kind)
    end, size = 0, latent_cache.shape[1]
    for b, (queries, keys) in enumerate(zip(query_lengths, history_lengths, strict=True)):
        start, end = end, end + queries
        if queries and keys:
            table = block_table[b, : -(-keys // size)]
            if len(table) * size < keys or table.min() < 0 or table.max() >= len(latent_cache):
                raise attention.outside(b, block_table[b], keys, len(latent_cache))
            q, r = (part[start:end].flatten(0, 1).to(kind) for part in (q_latent, q_rope))
            latents, ropes = (_tiles(cache, table, keys, kind) for cache in (latent_cache, rope_cache))
            total, peak, summed = attend_tiles(q, r, zip(latents, ropes, strict=True), scale)
            hist[start:end].view(-1, latent).copy_(summed.div_(total))
            lse[start:end].view(-1, 1).copy_(total.log_().add_(peak))
    return hist, lse


def _tiles(cache: torch.Tensor, table: torch.Tensor, keys: int, kind: torch.dtype) -> Iterator[torch.Tensor]:
    """The first `keys` rows of the blocks in `table`, as [n, features] of dtype `kind`, n at most a tile.

    A view of the cache where blocks follow each other and nothing is to be
    widened; else one buffer, so a tile is used before the next is asked for.
    """
    _, size, features = cache.shape
    blocks, step = table.tolist(), max(1, TILE // size)
    gathered = cache.new_empty(min(step, len(blocks)), size, features)
    widened = gathered if cache.dtype == kind else torch.empty_like(gathered, dtype=kind)
    for at in range(0, len(blocks), step):
        some = blocks[at : at + step]
        first, count = some[0], len(some)
        if some == list(range(first, first + count)):
            rows = cache[first : first + count]
        else:
            rows = torch.index_select(cache, 0, table[at : at + step], out=gathered[:count])
        if cache.dtype != kind:
            rows = widened[:count].copy_(rows)
        yield rows.flatten(0, 1)[: keys - at * size]
