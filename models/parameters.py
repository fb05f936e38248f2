"""A model's parameters as plain pytrees of tensors; `mla_fx.models.weights` says what checkpoints have for them."""

from typing import Generic, NamedTuple, TypeVar

from mla_fx.parameters import LayerParams

Leaf = TypeVar("Leaf")


class ModelParams(NamedTuple, Generic[Leaf]):
    """One rank's part of a model: `embed_tokens` [A, D], an entry a layer, `norm` [D], `lm_head` [A, D]."""

    embed_tokens: Leaf
    layers: list[LayerParams[Leaf]]
    norm: Leaf
    lm_head: Leaf


class MtpParams(NamedTuple, Generic[Leaf]):
    """One rank's part of a multi-token prediction module.

    `embed_tokens` [A, D], `enorm` [D], `hnorm` [D]; `eh_proj` [G, D] of the embedding and [G, D] of the hidden state,
    rows shared out over the ranks; one decoder layer; `norm` [D] and `lm_head` [A, D] of the shared head.
    """

    embed_tokens: Leaf
    enorm: Leaf
    hnorm: Leaf
    eh_proj: tuple[Leaf, Leaf]
    layer: LayerParams[Leaf]
    norm: Leaf
    lm_head: Leaf
