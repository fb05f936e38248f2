"""Names and shapes of every tensor of a DeepSeek-V2 or V3 checkpoint.

Source: the checkpoints as DeepSeek and transformers write them: the weight of
a projection is [out, in], every expert has tensors of its own, and prediction
layers follow the decoder layers.
"""

from collections.abc import Iterable

from mla_fx.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def expected(config: ModelConfig) -> Shapes:
    """Every tensor that the checkpoint must have, in the order of the layers; prediction layers are `prediction`'s."""
    hidden = config.attention.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        shapes |= _layer(config, layer)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def prediction(config: ModelConfig, layer: int) -> Shapes:
    """Tensors of a prediction layer, numbered behind the decoder layers."""
    hidden, prefix = config.attention.hidden_size, f"model.layers.{layer}."
    own: Shapes = {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
    }
    return {f"{prefix}{name}": shape for name, shape in own.items()} | _layer(config, layer)


def optional(config: ModelConfig) -> Shapes:
    """Tensors that may be there: a prediction layer's own embedding and head, and a head that is tied."""
    table = (config.vocab_size, config.attention.hidden_size)
    names = [
        f"model.layers.{layer}.{name}.weight"
        for layer in prediction_layers(config)
        for name in ("embed_tokens", "shared_head.head")
    ]
    return dict.fromkeys([*names, "lm_head.weight"] if config.tie_word_embeddings else names, table)


def prediction_layers(config: ModelConfig) -> Iterable[int]:
    """Numbers of the prediction layers."""
    return range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)


def is_projection(name: str) -> bool:
    """Whether a name is that of a projection's weight, which is FP8 in a checkpoint that is."""
    return name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))


def _layer(config: ModelConfig, layer: int) -> Shapes:
    hidden = config.attention.hidden_size
    shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    shapes |= _attention(config)
    if config.moe is None or not config.is_moe(layer):
        shapes |= _mlp("mlp.", hidden, config.intermediate_size)
    else:
        moe = config.moe
        shapes["mlp.gate.weight"] = (moe.n_routed_experts, hidden)
        if moe.topk_method == "noaux_tc":
            shapes["mlp.gate.e_score_correction_bias"] = (moe.n_routed_experts,)
        for expert in range(moe.n_routed_experts):
            shapes |= _mlp(f"mlp.experts.{expert}.", hidden, moe.moe_intermediate_size)
        if moe.n_shared_experts:
            shapes |= _mlp("mlp.shared_experts.", hidden, moe.moe_intermediate_size * moe.n_shared_experts)
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def _attention(config: ModelConfig) -> Shapes:
    c = config.attention
    heads, lora = c.num_attention_heads, c.q_lora_rank
    if lora is None:
        query: Shapes = {"q_proj": (heads * c.qk_head_dim, c.hidden_size)}
    else:
        query = {
            "q_a_proj": (lora, c.hidden_size),
            "q_a_layernorm": (lora,),
            "q_b_proj": (heads * c.qk_head_dim, lora),
        }
    shapes = query | {
        "kv_a_proj_with_mqa": (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
        "kv_a_layernorm": (c.kv_lora_rank,),
        "kv_b_proj": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "o_proj": (c.hidden_size, heads * c.v_head_dim),
    }
    return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _mlp(prefix: str, hidden: int, width: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }
