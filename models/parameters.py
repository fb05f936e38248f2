"""A model's parameters as plain pytrees of tensors, their shapes, and how the ranks share them.

Every rank holds its heads' part of the attention, its experts, its columns of
dense and shared networks and its rows of the vocabulary; norms, the gate and
the down projections of query and keys are on all ranks.  Where the ranks do
not divide a number, shares are rounded up and the last ones are padded with
zeros, which add nothing: an expert that is never chosen, a column of zeros, a
row of the vocabulary that no token names.
"""

from typing import Generic, NamedTuple, TypeVar

from mla_fx.config import MoeConfig
from mla_fx.decode import StepShape, attention_avals, weight_aval
from mla_fx.effects import Aval
from mla_fx.effects.aval import wide_dtype
from mla_fx.models.config import ModelConfig
from mla_fx.parameters import LayerParams, MlpParams, MoeParams

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


def share(total: int, ranks: int) -> int:
    """How many of `total` a rank holds, padding included.

    >>> share(256, 8), share(10, 4)
    (32, 3)
    """
    return -(-total // ranks)


def part(total: int, rank: int, ranks: int) -> slice:
    """Those of `total` that a rank really holds, none for the last ranks where there are few.

    >>> [part(10, rank, 4) for rank in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    size = share(total, ranks)
    return slice(min(rank * size, total), min((rank + 1) * size, total))


def layer_avals(config: ModelConfig, shape: StepShape, layer: int) -> LayerParams[Aval]:
    """Shapes of one rank's part of decoder layer number `layer`."""
    hidden = config.attention.hidden_size
    norm = Aval((hidden,), shape.dtype)
    feed_forward: MlpParams[Aval] | MoeParams[Aval] = (
        moe_avals(config.moe, shape, hidden)
        if config.moe is not None and config.is_moe(layer)
        else mlp_avals(shape, hidden, config.intermediate_size)
    )
    return LayerParams(norm, attention_avals(config.attention, shape), norm, feed_forward)


def mlp_avals(shape: StepShape, hidden: int, width: int) -> MlpParams[Aval]:
    """Shapes of one rank's columns of a network of `width`."""
    columns = share(width, shape.ranks)
    return MlpParams(weight_aval(shape, 2 * columns, hidden), weight_aval(shape, hidden, columns))


def moe_avals(moe: MoeConfig, shape: StepShape, hidden: int) -> MoeParams[Aval]:
    """Shapes of one rank's experts."""
    own, width = share(moe.n_routed_experts, shape.ranks), moe.moe_intermediate_size
    return MoeParams(
        gate=Aval((moe.n_routed_experts, hidden), shape.dtype),
        e_score_correction_bias=Aval((moe.n_routed_experts,), wide_dtype(shape.dtype)),
        gate_up_proj=weight_aval(shape, own, 2 * width, hidden),
        down_proj=weight_aval(shape, own, hidden, width),
        shared_experts=mlp_avals(shape, hidden, width * moe.n_shared_experts) if moe.n_shared_experts else (),
    )


def model_avals(config: ModelConfig, shape: StepShape) -> ModelParams[Aval]:
    """Shapes of one rank's part of a model."""
    hidden = config.attention.hidden_size
    table = Aval((share(config.vocab_size, shape.ranks), hidden), shape.dtype)
    layers = [layer_avals(config, shape, layer) for layer in range(config.num_hidden_layers)]
    return ModelParams(table, layers, Aval((hidden,), shape.dtype), table)


def mtp_avals(config: ModelConfig, shape: StepShape) -> MtpParams[Aval]:
    """Shapes of one rank's part of the prediction module."""
    hidden = config.attention.hidden_size
    table = Aval((share(config.vocab_size, shape.ranks), hidden), shape.dtype)
    half, norm = Aval((share(hidden, shape.ranks), hidden), shape.dtype), Aval((hidden,), shape.dtype)
    layer = layer_avals(config, shape, config.num_hidden_layers)
    return MtpParams(table, norm, norm, (half, half), layer, norm, table)
