"""Ascend rule of `ops.HistoryAttention`: the paged shard, without a mask."""

from typing import Any

import torch

from mla_fx.backends.ascend.calls import attention
from mla_fx.backends.ascend.calls.attention import fused, plain, unseen
from mla_fx.backends.device import Run
from mla_fx.effects import Aval, ops


def takes(op: ops.HistoryAttention, q_latent: Aval, q_rope: Aval, *cached: Aval) -> str | None:
    """Queries as in any attention here; blocks and table as the operator pages them."""
    if (why := attention.takes(q_latent, q_rope)) or q_latent.dtype == "fp32":
        return why
    size, columns = cached[0].shape[1], cached[2].shape[1]
    if size % 16 or not 16 <= size <= 1024:
        return f"block_size: attention on ascend needs a multiple of 16 in 16..1024: got {size}"
    return None if columns else "table_width: attention on ascend needs at least 1 column of block_table: got 0"


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
    """With paging the key lengths are per request, the query lengths cumulative."""
    if q_latent.dtype != torch.float32:
        caches = [part.contiguous().unsqueeze(1) for part in (latent_cache, rope_cache)]  # [C, KV heads = 1, S, ...]
        how: dict[str, Any] = {
            "workspace": run.scratch(workspace),
            "scale": scale,
            "block_table": block_table.contiguous(),
            "block_size": latent_cache.shape[1],
            "sparse_mode": 0,
        }
        return fused(q_latent, q_rope, *caches, host=(query_lengths, history_lengths), **how)
    hist, lse = unseen(q_latent)
    end, size = 0, latent_cache.shape[1]
    for b, (queries, keys) in enumerate(zip(query_lengths, history_lengths, strict=True)):
        start, end = end, end + queries
        if queries and keys:
            table, rows = block_table[b, : -(-keys // size)], slice(start, end)
            c, k = (torch.index_select(part, 0, table).flatten(0, 1)[:keys] for part in (latent_cache, rope_cache))
            hist[rows], lse[rows] = plain(q_latent[rows], q_rope[rows], c, k, scale=scale)
    return hist, lse
