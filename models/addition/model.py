"""The architecture of DeepSeek-V3 with its MTP layer, written from its definition: the oracle of the addition model.

`forward` and `mtp_forward` are functions of a dictionary of tensors under
their checkpoint names and of the fields of a `config.json`: dense causal
attention, no cache, nothing absorbed.  In the shapes below, B is the batch,
S the sequence, H `hidden_size`, N heads, E routed experts of width I, and V
the vocabulary.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, for MLA; DeepSeek-V3
(arXiv 2412.19437), sections 2.1 and 2.2, for the experts and the MTP layer;
YaRN (arXiv 2309.00071), sections 3.2 and 3.4.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = Mapping[str, Tensor]
Config = Mapping[str, Any]


def forward(
    tensors: Tensors, config: Config, tokens: Tensor, *, routed: dict[int, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Logits [B, S, V] and hidden states [B, S, H] after the final norm, of tokens [B, S], in the tensors' dtype.

    `routed`, if given, receives for every layer with experts which of them each token chose, bool [B, S, E].
    """
    x = F.embedding(tokens, tensors["model.embed_tokens.weight"])
    for layer in range(config["num_hidden_layers"]):
        x = decoder_layer(tensors, config, layer, x, routed)
    hidden = rms_norm(x, tensors["model.norm.weight"], config["rms_norm_eps"])
    return F.linear(hidden, tensors["lm_head.weight"]), hidden


def mtp_forward(
    tensors: Tensors, config: Config, tokens: Tensor, hidden: Tensor, *, routed: dict[int, Tensor] | None = None
) -> Tensor:
    """The MTP layer's logits [B, S - 1, V] for tokens [B, S] and the hidden states [B, S, H] that `forward` gives.

    Row i joins token i + 1 with hidden state i, stands at position i, and predicts token i + 2.  The embedding
    that meets position 0 is replaced by zero, as inference engines do.
    """
    layer, eps = config["num_hidden_layers"], config["rms_norm_eps"]
    prefix = f"model.layers.{layer}."
    embedded = F.embedding(tokens[:, 1:], tensors[f"{prefix}embed_tokens.weight"])
    embedded = torch.cat((torch.zeros_like(embedded[:, :1]), embedded[:, 1:]), dim=1)
    embedded = rms_norm(embedded, tensors[f"{prefix}enorm.weight"], eps)
    before = rms_norm(hidden[:, :-1], tensors[f"{prefix}hnorm.weight"], eps)
    x = F.linear(torch.cat((embedded, before), dim=-1), tensors[f"{prefix}eh_proj.weight"])
    x = decoder_layer(tensors, config, layer, x, routed)
    x = rms_norm(x, tensors[f"{prefix}shared_head.norm.weight"], eps)
    return F.linear(x, tensors[f"{prefix}shared_head.head.weight"])


def decoder_layer(
    tensors: Tensors, config: Config, layer: int, x: Tensor, routed: dict[int, Tensor] | None = None
) -> Tensor:
    """One layer on the residual stream [B, S, H]: attention, then a feed-forward network or experts."""
    prefix, eps = f"model.layers.{layer}.", config["rms_norm_eps"]
    normed = rms_norm(x, tensors[f"{prefix}input_layernorm.weight"], eps)
    x = x + attention(tensors, config, f"{prefix}self_attn.", normed)
    normed = rms_norm(x, tensors[f"{prefix}post_attention_layernorm.weight"], eps)
    if layer < config["first_k_dense_replace"]:
        return x + mlp(tensors, f"{prefix}mlp.", normed)
    weights = route(tensors, config, f"{prefix}mlp.gate.", normed)
    if routed is not None:
        routed[layer] = weights > 0
    return x + experts(tensors, f"{prefix}mlp.", normed, weights) + mlp(tensors, f"{prefix}mlp.shared_experts.", normed)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Features over their root mean square, which is taken in float32, times the weight."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


def attention(tensors: Tensors, config: Config, prefix: str, x: Tensor) -> Tensor:
    """Causal multi-head latent attention [B, S, H] -> [B, S, H]; keys and values are expanded from the latent."""
    nope, rank = config["qk_nope_head_dim"], config["kv_lora_rank"]
    by_head = (*x.shape[:2], config["num_attention_heads"], -1)
    # The two low-rank norms have an epsilon of their own, which no config.json states.
    query = rms_norm(F.linear(x, tensors[f"{prefix}q_a_proj.weight"]), tensors[f"{prefix}q_a_layernorm.weight"], 1e-6)
    query = F.linear(query, tensors[f"{prefix}q_b_proj.weight"]).view(by_head)
    compressed = F.linear(x, tensors[f"{prefix}kv_a_proj_with_mqa.weight"])
    latent = rms_norm(compressed[..., :rank], tensors[f"{prefix}kv_a_layernorm.weight"], 1e-6)
    key_value = F.linear(latent, tensors[f"{prefix}kv_b_proj.weight"]).view(by_head)

    # Scores [B, N, S, S]: features without position, then those with; of the latter, one key serves all heads.
    scores = torch.einsum("bsnd,btnd->bnst", query[..., :nope], key_value[..., :nope]).float()
    q_rope, k_rope = rotate(query[..., nope:], config), rotate(compressed[..., None, rank:], config)
    scores = scores + torch.einsum("bsnr,btr->bnst", q_rope, k_rope.squeeze(2)).float()
    shares = causal_softmax(scores * softmax_scale(config)).to(x.dtype)
    out = torch.einsum("bnst,btnv->bsnv", shares, key_value[..., nope:]).flatten(2)
    return F.linear(out, tensors[f"{prefix}o_proj.weight"])


def causal_softmax(scores: Tensor) -> Tensor:
    """Softmax of scores [..., S, S] over the keys that are not later than the query."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    scores = scores.masked_fill(later, -math.inf)
    shares = (scores - scores.detach().amax(dim=-1, keepdim=True)).exp()
    return shares / shares.sum(dim=-1, keepdim=True)


def softmax_scale(config: Config) -> float:
    """(nope + rope)^-1/2, times the square of YaRN's magnitude."""
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return float(width**-0.5 * magnitude(config, "mscale_all_dim") ** 2)


def magnitude(config: Config, name: str) -> float:
    """YaRN's 0.1 mscale ln(factor) + 1; 1 without YaRN."""
    scaling = config.get("rope_scaling") or {}
    return 0.1 * float(scaling.get(name, 0.0)) * math.log(scaling.get("factor", 1.0)) + 1.0


def rotate(x: Tensor, config: Config) -> Tensor:
    """Rotary embedding of x [B, S, N, R] at positions 0 .. S - 1, in float32.

    Features 2 i and 2 i + 1 are one complex number, which frequency i turns by its angle per position.
    """
    position = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)
    angle = (position[:, None] * frequencies(config).to(x.device))[:, None]  # [S, 1, R / 2]
    size = magnitude(config, "mscale") / magnitude(config, "mscale_all_dim")
    turn = torch.polar(torch.full_like(angle, size), angle)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def frequencies(config: Config) -> Tensor:
    """Angle per position of each of the R / 2 pairs, float32.

    YaRN divides by `factor` the frequencies of pairs that turn less than `beta_slow` times within the original
    context, leaves those that turn more than `beta_fast` times, and goes from one to the other linearly.
    """
    theta, rope = float(config["rope_theta"]), int(config["qk_rope_head_dim"])
    pair = torch.arange(rope // 2, dtype=torch.float32)
    plain = theta ** (-2.0 * pair / rope)
    scaling = config.get("rope_scaling")
    if not scaling:
        return plain

    def pair_that_turns(times: float) -> float:
        length = scaling["original_max_position_embeddings"] / (2 * math.pi * times)
        return float(rope * math.log(length) / (2 * math.log(theta)))

    first = max(math.floor(pair_that_turns(scaling["beta_fast"])), 0)
    last = min(math.ceil(pair_that_turns(scaling["beta_slow"])), rope - 1)
    slowed = ((pair - first) / max(last - first, 1e-3)).clamp(0, 1)
    return plain / float(scaling["factor"]) * slowed + plain * (1 - slowed)


def mlp(tensors: Tensors, prefix: str, x: Tensor) -> Tensor:
    """Gated feed-forward network: down(silu(gate(x)) * up(x))."""
    gate = F.silu(F.linear(x, tensors[f"{prefix}gate_proj.weight"]))
    return F.linear(gate * F.linear(x, tensors[f"{prefix}up_proj.weight"]), tensors[f"{prefix}down_proj.weight"])


def route(tensors: Tensors, config: Config, prefix: str, x: Tensor) -> Tensor:
    """Weight of each routed expert for each token, float32 [B, S, E]; zero where an expert is not chosen.

    The correction bias has a part in the choice only, not in the weights.
    """
    scores = F.linear(x.float(), tensors[f"{prefix}weight"].float()).sigmoid()
    biased = scores.detach() + tensors[f"{prefix}e_score_correction_bias"].float()
    groups = biased.view(*biased.shape[:-1], config["n_group"], -1)
    best_groups = groups.topk(2, dim=-1).values.sum(dim=-1).topk(config["topk_group"], dim=-1).indices
    closed = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best_groups, False)
    chosen = groups.masked_fill(closed[..., None], -math.inf).flatten(-2).topk(config["num_experts_per_tok"]).indices
    weights = scores.gather(-1, chosen)
    if config["norm_topk_prob"]:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return torch.zeros_like(scores).scatter(-1, chosen, weights * config["routed_scaling_factor"])


def experts(tensors: Tensors, prefix: str, x: Tensor, weights: Tensor) -> Tensor:
    """Sum of the routed experts' outputs [B, S, H], by weights [B, S, E].

    Every expert works on every token, and weighs nothing where it is not chosen: side by side, few experts are one
    wide network, whose middle [B, S, E * I] is weighted by expert.
    """

    def side_by_side(name: str, dim: int) -> Tensor:
        return torch.cat([tensors[f"{prefix}experts.{e}.{name}.weight"] for e in range(weights.shape[-1])], dim=dim)

    gate = F.silu(F.linear(x, side_by_side("gate_proj", 0)))
    middle = (gate * F.linear(x, side_by_side("up_proj", 0))).view(*weights.shape, -1)
    return F.linear((middle * weights[..., None].to(x.dtype)).flatten(-2), side_by_side("down_proj", 1))
