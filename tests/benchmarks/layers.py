"""A decoder layer with experts in one decode step: ours, written by hand in torch, and transformers', on equal weights.

Each has so many tokens of history for each request and decodes one more, which
it forgets again: the same work at every call.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from attrs import define, field
from torch.nn import functional
from torch.utils import _pytree as pytree
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from mla_fx import Sharding, StepShape, backends, orchestrations
from mla_fx.backends import Backend
from mla_fx.backends.cpu import products
from mla_fx.decode import angles_of, batch_avals, cache_avals, plan_step, weight_avals
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, Step, parameters, schedule, trace
from mla_fx.models import ModelConfig
from mla_fx.models.stack import decoder_layer
from mla_fx.models.weights import layer_weights
from mla_fx.parameters import Cache, LayerParams
from mla_fx.rope import frequencies

BLOCK = 64


@define(eq=False)
class Case:
    """The layer, its history and new hidden states, drawn by one seed; positions are those of `history`."""

    config: ModelConfig
    requests: int
    history: int
    dtype: str
    params: LayerParams[torch.Tensor] = field(init=False)
    latent: torch.Tensor = field(init=False)  # [requests, blocks of a request, BLOCK, L], with room for the new token
    rope: torch.Tensor = field(init=False)
    hidden: torch.Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        generator, kind = torch.Generator().manual_seed(0), DTYPES[self.dtype]

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(kind)

        def weight(aval: Aval) -> torch.Tensor:
            if len(aval.shape) == 1:  # norms
                return torch.ones(aval.shape, dtype=DTYPES[aval.dtype])
            made = torch.empty(aval.shape, dtype=kind)
            for matrix in (
                made if made.dim() == 3 else [made]
            ):  # one after the other: they are wide while they are drawn
                matrix.copy_(torch.randn(matrix.shape, generator=generator) * aval.shape[-1] ** -0.5)
            return made

        self.params = pytree.tree_map(weight, weight_avals(layer_weights(self.config, 0), self.shape))
        self.params.feed_forward.e_score_correction_bias.zero_()
        sizes, width = self.config.attention, self.shape.table_width
        self.latent = drawn(self.requests, width, BLOCK, sizes.kv_lora_rank)
        self.rope = drawn(self.requests, width, BLOCK, sizes.qk_rope_head_dim)
        self.hidden = drawn(self.requests, sizes.hidden_size)

    @property
    def shape(self) -> StepShape:
        width = self.history // BLOCK + 1
        return StepShape(
            tokens=self.requests,
            requests=self.requests,
            blocks=self.requests * width,
            block_size=BLOCK,
            table_width=width,
            dtype=self.dtype,
        )

    def alone(self, request: int) -> "Case":
        """One of the requests, with the same weights."""
        one = copy(self)
        one.requests, only = 1, slice(request, request + 1)
        one.latent, one.rope, one.hidden = self.latent[only], self.rope[only], self.hidden[only]
        return one

    def bytes(self) -> int:
        """What a step must read: the history, and the weights, of experts those that are chosen by some token."""
        chosen = self.config.moe.num_experts_per_tok * self.requests
        experts = self.params.feed_forward
        routed = (experts.gate_up_proj, experts.down_proj)
        rest = sum(leaf.nbytes for leaf in pytree.tree_leaves(self.params)) - sum(one.nbytes for one in routed)
        used = min(1.0, chosen / self.config.moe.n_routed_experts)
        keys = (self.latent[0, 0, 0].nbytes + self.rope[0, 0, 0].nbytes) * self.requests * self.history
        return rest + int(used * sum(one.nbytes for one in routed)) + keys


def ours(case: Case, backend: Backend | None = None) -> Callable[[], torch.Tensor]:
    """Compiled, for the CPU or another backend; the new token's rows are written over at every call."""
    backend = backend or backends.get("cpu")
    program = schedule(backend.lower(step_of(case)), orchestrations.serial)
    run = backend.compile(program, backend.prepare(program, [case.params]))
    cache = backend.put(Cache(*(part.flatten(0, 1) for part in (case.latent, case.rope))), copy=True)
    table = torch.arange(case.shape.blocks).view(case.requests, -1).tolist()
    history, query = [case.history] * case.requests, [1] * case.requests
    (batch,) = plan_step(Sharding(block_size=BLOCK), case.shape, history=history, query=query, block_table=table)
    hidden = backend.put(case.hidden)
    return lambda: run([cache], [hidden], [batch])[0][0]


def step_of(case: Case) -> Step:
    """The layer as a step: `(params, cache, hidden, batch) -> (hidden, cache)`."""
    config, shape = case.config, case.shape

    def layer(params: Any, cache: Any, hidden: Any, batch: Any) -> Any:
        angles = angles_of(batch, hidden, config=config.attention, shape=shape)
        return decoder_layer(hidden, params, cache, angles, batch, config=config, shape=shape)

    return trace(
        layer,
        "layer",
        params=parameters(weight_avals(layer_weights(config, 0), shape)),
        cache=cache_avals(config.attention, shape),
        hidden=Aval((shape.tokens, config.attention.hidden_size), shape.dtype),
        batch=batch_avals(shape),
    )


@define(eq=False)
class ByHand:
    """The straight-line code that a person would write: absorbed, one cache of latent and rope, the torch pair.

    Weights are packed by oneDNN where it multiplies their dtype, and stacked; elsewhere they are as they are, or with
    `widened` float32, twice the memory, packed.
    """

    case: Case
    widened: bool = False
    products: dict[str, Any] = field(init=False)
    keys: torch.Tensor = field(init=False)  # [requests, capacity, L + R]

    def __attrs_post_init__(self) -> None:
        case, p = self.case, self.case.params
        a, f = p.attention, p.feed_forward
        shared = f.shared_experts
        self.products = {
            "in": self.product(torch.cat([a.query.q_a_proj, a.kv_a_proj])),
            "q": self.product(a.query.q_b_proj),
            "o": self.product(a.o_proj),
            "shared_in": self.product(shared.gate_up_proj),
            "shared_out": self.product(shared.down_proj),
            "experts": [(self.product(x), self.product(y)) for x, y in zip(f.gate_up_proj, f.down_proj, strict=True)],
        }
        self.keys = torch.cat([case.latent.flatten(1, 2), case.rope.flatten(1, 2)], 2)

    def product(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        kind = weight.dtype
        if self.widened:
            weight = weight.float()
        if not products.has(weight.dtype) or (weight.dtype == torch.float32 and not self.widened):
            return lambda x: functional.linear(x, weight)
        packed = products.one_dnn(weight)
        multiply = torch.ops.mkldnn._linear_pointwise
        return lambda x: multiply(x.to(weight.dtype), packed, None, "none", [], "").to(kind)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Interleaved features [.., R] at the position behind the history, in float32."""
        angles = torch.tensor(frequencies(self.case.config.attention)) * self.case.history
        cos, sin = angles.cos(), angles.sin()
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1).to(x.dtype)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        config, a, end = self.case.config.attention, self.case.params.attention, self.case.history + 1
        rank, latent, heads = config.q_lora_rank, config.kv_lora_rank, config.num_attention_heads
        q_a, kv = self.products["in"](x).split([rank, latent + config.qk_rope_head_dim], 1)
        q = self.products["q"](functional.rms_norm(q_a, (rank,), a.query.q_a_layernorm, config.latent_norm_eps))
        q_nope, q_rope = q.view(len(x), heads, -1).split([config.qk_nope_head_dim, config.qk_rope_head_dim], 2)
        absorbed = self.per_head(q_nope, a.w_uk)
        query = torch.cat([absorbed, self.rotated(q_rope)], 2)
        key = functional.rms_norm(kv[:, :latent], (latent,), a.kv_a_layernorm, config.latent_norm_eps)
        self.keys[:, end - 1] = torch.cat([key, self.rotated(kv[:, latent:])], 1)
        out = torch.empty_like(absorbed)
        for b, keys in enumerate(self.keys[:, :end]):
            mine = keys if products.has(keys.dtype) else keys.float()
            scores = torch.mm(query[b].to(mine.dtype), mine.t())
            weights = torch.softmax(scores.float() * config.softmax_scale, 1).to(mine.dtype)
            out[b] = torch.mm(weights, mine[:, :latent])
        return self.products["o"](self.per_head(out, a.w_uv).flatten(1))

    @staticmethod
    def per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if products.has(x.dtype):
            return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
        return torch.bmm(x.transpose(0, 1).float(), weight.float()).transpose(0, 1).to(x.dtype)

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        config, f = self.case.config.moe, self.case.params.feed_forward
        p = functional.linear(x.float(), f.gate.float()).sigmoid()
        groups = p.view(len(x), config.n_group, -1)
        kept = groups.topk(2, -1).values.sum(-1).topk(config.topk_group, -1).indices
        mask = torch.zeros(len(x), config.n_group).scatter_(1, kept, 1).bool()
        chosen = groups.masked_fill(~mask[..., None], -1).flatten(1).topk(config.num_experts_per_tok, -1).indices
        weights = p.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * config.routed_scaling_factor
        out = torch.zeros(x.shape)
        for y in chosen.unique().tolist():
            token, place = torch.where(chosen == y)
            gate_up, down = self.products["experts"][y]
            out.index_add_(0, token, down(gated(gate_up(x[token]))).float() * weights[token, place, None])
        return out.to(x.dtype) + self.products["shared_out"](gated(self.products["shared_in"](x)))

    def __call__(self) -> torch.Tensor:
        p, epsilon, h = self.case.params, self.case.config.attention.rms_norm_eps, self.case.hidden
        h = h + self.attention(functional.rms_norm(h, h.shape[1:], p.input_layernorm, epsilon))
        return h + self.experts(functional.rms_norm(h, h.shape[1:], p.post_attention_layernorm, epsilon))


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, 1)
    return functional.silu(gate) * up


def theirs(case: Case) -> Callable[[], torch.Tensor]:
    """transformers' layer with its SDPA, over a DynamicCache of latents."""
    sizes, moe = case.config.attention, case.config.moe
    config = DeepseekV3Config(
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_attention_heads,
        q_lora_rank=sizes.q_lora_rank,
        kv_lora_rank=sizes.kv_lora_rank,
        qk_nope_head_dim=sizes.qk_nope_head_dim,
        qk_rope_head_dim=sizes.qk_rope_head_dim,
        v_head_dim=sizes.v_head_dim,
        moe_intermediate_size=moe.moe_intermediate_size,
        n_routed_experts=moe.n_routed_experts,
        n_shared_experts=moe.n_shared_experts,
        num_experts_per_tok=moe.num_experts_per_tok,
        n_group=moe.n_group,
        topk_group=moe.topk_group,
        routed_scaling_factor=moe.routed_scaling_factor,
        first_k_dense_replace=0,
        num_hidden_layers=1,
        rms_norm_eps=sizes.rms_norm_eps,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        layer = DeepseekV3DecoderLayer(config, 0).to(DTYPES[case.dtype]).eval()
    layer.load_state_dict(state(case.params), assign=True)
    angles = torch.tensor(frequencies(sizes)) * case.history
    angles = torch.cat([angles, angles])[None, None].to(torch.float32)
    position = tuple(part.to(DTYPES[case.dtype]) for part in (angles.cos(), angles.sin()))
    keys = [part.flatten(1, 2)[:, None, : case.history].contiguous() for part in (case.latent, case.rope)]

    def step() -> torch.Tensor:
        cache = DynamicCache()
        cache.update(keys[0][..., :0, :], keys[1][..., :0, :], 0)
        cache.layers[0].keys, cache.layers[0].values = keys
        hidden = case.hidden[:, None]
        out: torch.Tensor = layer(hidden, attention_mask=None, cache=cache, position_embeddings=position)
        return out[:, 0]

    return torch.inference_mode()(step)


def state(params: LayerParams[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our parameters under transformers' names; the absorbed halves are one matrix again."""
    a, f = params.attention, params.feed_forward
    gate, up = f.shared_experts.gate_up_proj.chunk(2)
    return {
        "input_layernorm.weight": params.input_layernorm,
        "post_attention_layernorm.weight": params.post_attention_layernorm,
        "self_attn.q_a_proj.weight": a.query.q_a_proj,
        "self_attn.q_a_layernorm.weight": a.query.q_a_layernorm,
        "self_attn.q_b_proj.weight": a.query.q_b_proj,
        "self_attn.kv_a_proj_with_mqa.weight": a.kv_a_proj,
        "self_attn.kv_a_layernorm.weight": a.kv_a_layernorm,
        "self_attn.kv_b_proj.weight": torch.cat([a.w_uk, a.w_uv.mT], 1).flatten(0, 1),
        "self_attn.o_proj.weight": a.o_proj,
        "mlp.gate.weight": f.gate,
        "mlp.gate.e_score_correction_bias": f.e_score_correction_bias,
        "mlp.experts.gate_up_proj": f.gate_up_proj,
        "mlp.experts.down_proj": f.down_proj,
        "mlp.shared_experts.gate_proj.weight": gate,
        "mlp.shared_experts.up_proj.weight": up,
        "mlp.shared_experts.down_proj.weight": f.shared_experts.down_proj,
    }
