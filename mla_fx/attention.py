"""Attention of a decode step in two parts, and the cache write.

Values in, values out; formulas are with the ops.
"""

from mla_fx.effects import Value, bind, ops
from mla_fx.parameters import Cache


def write_cache(cache: Cache[Value], latent: Value, k_rope: Value, slots: Value) -> Cache[Value]:
    """Write the new tokens' rows; returns the next version of the cache.  See `ops.WriteRows`.

    `latent` [T, L], `k_rope` [T, R], `slots` int64 [T] with -1 for rows that are not this rank's.
    """
    latent_cache, rope_cache = (
        bind(ops.WriteRows(), rows_cache, rows, slots, names=(rows_cache.name,))[0]
        for rows_cache, rows in ((cache.latent, latent), (cache.rope, k_rope))
    )
    return Cache(latent_cache, rope_cache)


def history_attention(
    q_latent: Value,
    q_rope: Value,
    cache: Cache[Value],
    block_table: Value,
    query_lengths: Value,
    history_lengths: Value,
    *,
    scale: float,
    workspace: str = ops.WORKSPACE,
) -> tuple[Value, Value]:
    """All heads' queries [T, H, L], [T, H, R] over this rank's shard -> output [T, H, L] and natural LSE [T, H].

    Unmasked; rows without a key give 0 and -inf.  See `ops.HistoryAttention`.
    """
    out, lse = bind(
        ops.HistoryAttention(scale, workspace),
        q_latent,
        q_rope,
        cache.latent,
        cache.rope,
        block_table,
        query_lengths,
        history_lengths,
    )
    return out, lse


def current_attention(
    q_latent: Value,
    q_rope: Value,
    latent: Value,
    k_rope: Value,
    query_lengths: Value,
    *,
    scale: float,
    workspace: str = ops.WORKSPACE,
) -> tuple[Value, Value]:
    """Own heads' queries [T, N, L], [T, N, R] over the new tokens, causal -> output [T, N, L] and natural LSE [T, N].

    See `ops.CurrentAttention`.
    """
    out, lse = bind(ops.CurrentAttention(scale, workspace), q_latent, q_rope, latent, k_rope, query_lengths)
    return out, lse
