"""Parameters and caches of decoder layers as plain pytrees, and how a checkpoint weight becomes them.

`kv_b_proj` [H * (P + V), L] holds, per head, P rows that expand the latent to
keys and V rows that expand it to values:

    w_uk[n, p, l] = kv_b_proj[n * (P + V) + p, l]
    w_uv[n, l, v] = kv_b_proj[n * (P + V) + P + v, l]

so that q_nope . (w_uk c) = (q_nope w_uk) . c, and sum_j p_j (w_uv^T c_j) = w_uv^T sum_j p_j c_j.
"""

import math
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from mla_fx.config import MlaConfig

#: A leaf: a tensor, or while a step is described an `Aval` or a `Value`.
Leaf = TypeVar("Leaf")


class Quantized(NamedTuple, Generic[Leaf]):
    """An 8-bit weight: `weight` int8 [..., F, D], `scale` [..., F] of each output feature.  See `ops.QuantLinear`."""

    weight: Leaf
    scale: Leaf


class QueryLora(NamedTuple, Generic[Leaf]):
    """Low-rank query of rank A: `q_a_proj` [A, D], `q_a_layernorm` [A], `q_b_proj` [heads * Q, A]."""

    q_a_proj: Leaf | Quantized[Leaf]
    q_a_layernorm: Leaf
    q_b_proj: Leaf | Quantized[Leaf]


class QueryPlain(NamedTuple, Generic[Leaf]):
    """Direct query: `q_proj` [heads * Q, D]."""

    q_proj: Leaf | Quantized[Leaf]


class AttentionParams(NamedTuple, Generic[Leaf]):
    """One rank's part of a layer's attention.

    `kv_a_proj` [K, D], `kv_a_layernorm` [L], `w_uk` [heads, P, L], `w_uv` [N, L, V], `o_proj` [D, N * V].
    heads is N, or H in `query` and `w_uk` with a replicated query projection.
    """

    query: QueryLora[Leaf] | QueryPlain[Leaf]
    kv_a_proj: Leaf | Quantized[Leaf]
    kv_a_layernorm: Leaf
    w_uk: Leaf
    w_uv: Leaf
    o_proj: Leaf | Quantized[Leaf]


class MlpParams(NamedTuple, Generic[Leaf]):
    """One rank's F columns of a feed-forward network: `gate_up_proj` [2 F, D], gate first; `down_proj` [D, F]."""

    gate_up_proj: Leaf | Quantized[Leaf]
    down_proj: Leaf | Quantized[Leaf]


class MoeParams(NamedTuple, Generic[Leaf]):
    """One rank's experts, Y of X, and its columns of the shared ones.

    `gate` [X, D], `e_score_correction_bias` [X] float32 (zeros where the model has none), `gate_up_proj` [Y, 2 F, D],
    `down_proj` [Y, D, F], `shared_experts` one network or () for none.
    """

    gate: Leaf
    e_score_correction_bias: Leaf
    gate_up_proj: Leaf | Quantized[Leaf]
    down_proj: Leaf | Quantized[Leaf]
    shared_experts: MlpParams[Leaf] | tuple[()]


class LayerParams(NamedTuple, Generic[Leaf]):
    """One rank's part of a decoder layer; both norms are [D]."""

    input_layernorm: Leaf
    attention: AttentionParams[Leaf]
    post_attention_layernorm: Leaf
    feed_forward: MlpParams[Leaf] | MoeParams[Leaf]


class Cache(NamedTuple, Generic[Leaf]):
    """One rank's paged cache of one layer: `latent` [C, S, L] (normalised), `rope` [C, S, R] (rotated)."""

    latent: Leaf
    rope: Leaf


class FullAttention(NamedTuple):
    """A layer's attention as a checkpoint has it, all heads: names and shapes of its `self_attn.*` weights."""

    query: QueryLora[torch.Tensor] | QueryPlain[torch.Tensor]
    kv_a_proj_with_mqa: torch.Tensor  # [K, D]
    kv_a_layernorm: torch.Tensor  # [L]
    kv_b_proj: torch.Tensor  # [H * (P + V), L]
    o_proj: torch.Tensor  # [D, H * V]


def heads_of(rank: int, *, ranks: int, heads: int) -> slice:
    """The heads that a rank of the group owns."""
    return slice(rank * (heads // ranks), (rank + 1) * (heads // ranks))


def shard_attention(
    full: FullAttention, config: MlaConfig, *, rank: int, ranks: int, replicate_query: bool = False
) -> AttentionParams[torch.Tensor]:
    """One rank's parameters from the weights of all heads; slices are copied, so `full` can go."""
    own = heads_of(rank, ranks=ranks, heads=config.num_attention_heads)
    asked = slice(0, config.num_attention_heads) if replicate_query else own
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    kv_b = full.kv_b_proj.view(config.num_attention_heads, nope + value, config.kv_lora_rank)

    def rows(weight: torch.Tensor | Quantized[torch.Tensor]) -> torch.Tensor:
        assert isinstance(weight, torch.Tensor), "weights of all heads are not in 8 bits"
        heads = weight.view(config.num_attention_heads, config.qk_head_dim, weight.shape[1])
        return heads[asked].reshape(-1, weight.shape[1])

    query: QueryLora[torch.Tensor] | QueryPlain[torch.Tensor]
    if isinstance(full.query, QueryLora):
        query = full.query._replace(q_b_proj=rows(full.query.q_b_proj))
    else:
        query = QueryPlain(rows(full.query.q_proj))
    columns = slice(own.start * value, own.stop * value)
    return AttentionParams(
        query=query,
        kv_a_proj=full.kv_a_proj_with_mqa,
        kv_a_layernorm=full.kv_a_layernorm,
        w_uk=kv_b[asked, :nope].contiguous(),
        w_uv=kv_b[own, nope:].transpose(1, 2).contiguous(),
        o_proj=full.o_proj[:, columns].contiguous(),
    )


def random_attention(
    config: MlaConfig, *, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> FullAttention:
    """Seeded weights with the spread of a trained model: each output feature has variance about 1."""

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(dtype)

    c, heads = config, config.num_attention_heads
    query: QueryLora[torch.Tensor] | QueryPlain[torch.Tensor]
    if c.q_lora_rank is None:
        query = QueryPlain(weight(heads * c.qk_head_dim, c.hidden_size))
    else:
        query = QueryLora(
            weight(c.q_lora_rank, c.hidden_size), norm(c.q_lora_rank), weight(heads * c.qk_head_dim, c.q_lora_rank)
        )
    return FullAttention(
        query,
        weight(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
        norm(c.kv_lora_rank),
        weight(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        weight(c.hidden_size, heads * c.v_head_dim),
    )


def empty_cache(
    config: MlaConfig, *, blocks: int, block_size: int, dtype: torch.dtype, layers: int = 1
) -> Sequence[Cache[torch.Tensor]]:
    """One rank's caches of `layers` layers, zero-filled."""
    return [
        Cache(
            torch.zeros(blocks, block_size, config.kv_lora_rank, dtype=dtype),
            torch.zeros(blocks, block_size, config.qk_rope_head_dim, dtype=dtype),
        )
        for _ in range(layers)
    ]
