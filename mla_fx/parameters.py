"""Parameters and caches of decoder layers as plain pytrees; `mla_fx.weights` says what checkpoints have for them."""

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
    heads is N, or H in `query` and `w_uk` with a replicated query projection, and in `w_uv` where values are projected
    before they are merged.
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
