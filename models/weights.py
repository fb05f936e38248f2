"""The table of a whole model's weights: `mla_fx.weights` has the attention and the networks, the rest is here.

Norms are on all ranks, and each rank has its rows of embedding and head.  Prediction layers are numbered behind the
decoder layers; they may have an embedding and a head of their own.
"""

from collections.abc import Iterable
from typing import Unpack

from mla_fx.decode import StepShape, weight_avals
from mla_fx.effects import Aval
from mla_fx.models.config import ModelConfig
from mla_fx.models.parameters import ModelParams, MtpParams
from mla_fx.parameters import LayerParams
from mla_fx.weights import Cut, Form, Kind, Weight, attention_weights, mlp_weights, moe_weights, named


def model_weights(
    config: ModelConfig, *, layers: Iterable[int] | None = None, **form: Unpack[Form]
) -> ModelParams[Weight]:
    """Embedding, decoder layers (all, or those numbered `layers`), final norm and head, which may be the embedding.

    `form`, here and below, is that of the attention: see `attention_weights`.
    """
    table = _table(config, "model.embed_tokens", kind="embedding")
    numbers = range(config.num_hidden_layers) if layers is None else layers
    return ModelParams(
        embed_tokens=table,
        layers=[layer_weights(config, layer, **form) for layer in numbers],
        norm=_norm(config, "model.norm"),
        lm_head=table if config.tie_word_embeddings else _table(config, "lm_head"),
    )


def layer_weights(config: ModelConfig, layer: int, **form: Unpack[Form]) -> LayerParams[Weight]:
    """Decoder layer number `layer`; those of prediction modules follow the others."""
    prefix, hidden = layer_prefix(layer), config.attention.hidden_size
    return LayerParams(
        input_layernorm=_norm(config, f"{prefix}input_layernorm"),
        attention=attention_weights(config.attention, f"{prefix}self_attn.", **form),
        post_attention_layernorm=_norm(config, f"{prefix}post_attention_layernorm"),
        feed_forward=moe_weights(config.moe, hidden, f"{prefix}mlp.")
        if config.moe is not None and config.is_moe(layer)
        else mlp_weights(hidden, config.intermediate_size, f"{prefix}mlp."),
    )


def mtp_weights(config: ModelConfig, layer: int, **form: Unpack[Form]) -> MtpParams[Weight]:
    """A prediction module; its two halves of `eh_proj` are of the embedding and of the hidden state."""
    prefix, hidden = layer_prefix(layer), config.attention.hidden_size
    halves = [
        Weight(
            names=(f"{prefix}eh_proj.weight",),
            shape=(hidden, 2 * hidden),
            kind="matrix",
            cut=Cut("rows", hidden),
            columns=slice(k * hidden, (k + 1) * hidden),
        )
        for k in (0, 1)
    ]
    return MtpParams(
        embed_tokens=_table(config, f"{prefix}embed_tokens", kind="embedding", optional=True),
        enorm=_norm(config, f"{prefix}enorm"),
        hnorm=_norm(config, f"{prefix}hnorm"),
        eh_proj=(halves[0], halves[1]),
        layer=layer_weights(config, layer, **form),
        norm=_norm(config, f"{prefix}shared_head.norm"),
        lm_head=_table(config, f"{prefix}shared_head.head", optional=True),
    )


def model_avals(config: ModelConfig, shape: StepShape) -> ModelParams[Aval]:
    """Shapes of one rank's part of a model."""
    # Layers with the same kind of network have the same shapes: one of each is enough.
    alike = {config.is_moe(layer): layer for layer in range(config.num_hidden_layers)}
    weights = model_weights(config, layers=alike.values(), **shape.form)
    own: ModelParams[Aval] = weight_avals(weights, shape)
    shapes = dict(zip(alike, own.layers, strict=True))
    return own._replace(layers=[shapes[config.is_moe(layer)] for layer in range(config.num_hidden_layers)])


def mtp_avals(config: ModelConfig, shape: StepShape) -> MtpParams[Aval]:
    """Shapes of one rank's part of the first prediction module."""
    weights = mtp_weights(config, config.num_hidden_layers, **shape.form)
    own: MtpParams[Aval] = weight_avals(weights, shape)
    return own


def expected(config: ModelConfig) -> dict[str, Weight]:
    """Every tensor that the checkpoint must have; prediction layers are `prediction`'s."""
    return named(model_weights(config))


def prediction(config: ModelConfig, layer: int) -> dict[str, Weight]:
    """Tensors that a prediction layer must have, where it is there at all."""
    return {name: weight for name, weight in named(mtp_weights(config, layer)).items() if not weight.optional}


def optional(config: ModelConfig) -> dict[str, Weight]:
    """Tensors that may be there: a prediction layer's own embedding and head, and a head that is tied."""
    modules = [mtp_weights(config, layer) for layer in prediction_layers(config)]
    head = [_table(config, "lm_head")] if config.tie_word_embeddings else []
    return named(([(module.embed_tokens, module.lm_head) for module in modules], head))


def prediction_layers(config: ModelConfig) -> Iterable[int]:
    """Numbers of the prediction layers."""
    return range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def _norm(config: ModelConfig, name: str) -> Weight:
    return Weight(names=(f"{name}.weight",), shape=(config.attention.hidden_size,), kind="norm")


def _table(config: ModelConfig, name: str, *, kind: Kind = "matrix", optional: bool = False) -> Weight:
    shape = (config.vocab_size, config.attention.hidden_size)
    cut = Cut("rows", config.vocab_size)
    return Weight(names=(f"{name}.weight",), shape=shape, kind=kind, cut=cut, optional=optional)
