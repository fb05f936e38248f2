"""Names and shapes of every tensor of a DeepSeek-V2 or V3 checkpoint.

Source: the checkpoints as DeepSeek and transformers write them: the weight of
a projection is [out, in], and every expert has tensors of its own.
"""

from mla_fx.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def expected(config: ModelConfig) -> Shapes:
    """Every tensor that the checkpoint must have, in the order of the layers."""
    hidden = config.attention.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}": shape for name, shape in _layer(config, layer).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def optional(config: ModelConfig, name: str) -> bool:
    """Tensors that may be there and are not read: multi-token prediction layers, and a head that is tied."""
    first, last = config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers
    if any(name.startswith(f"model.layers.{layer}.") for layer in range(first, last)):
        return True
    return config.tie_word_embeddings and name == "lm_head.weight"


def _layer(config: ModelConfig, layer: int) -> Shapes:
    hidden = config.attention.hidden_size
    norms: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if not config.is_moe(layer):
        return norms | _attention(config) | _mlp("mlp.", hidden, config.intermediate_size)
    experts = config.n_routed_experts or 0
    moe: Shapes = {"mlp.gate.weight": (experts, hidden)}
    if config.model_type == "deepseek_v3":
        moe["mlp.gate.e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        moe |= _mlp(f"mlp.experts.{expert}.", hidden, config.moe_intermediate_size)
    if config.n_shared_experts:
        moe |= _mlp("mlp.shared_experts.", hidden, config.moe_intermediate_size * config.n_shared_experts)
    return norms | _attention(config) | moe


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
