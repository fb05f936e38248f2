"""One decode step of MLA under decode context parallelism, composed of the pure functions.

`mla_attention` is the whole attention of a layer; read it first.  What makes a
step of it (`attention_step`) only names the inputs and says their shapes.
`mla_fx.models` stacks layers to a model.
"""

from typing import Any

from attrs import field, frozen

from mla_fx.attention import current_attention, history_attention, write_cache
from mla_fx.batch import Batch
from mla_fx.config import MlaConfig
from mla_fx.effects import Aval, Group, Step, Value, on_host, parameters, scope, staged, trace
from mla_fx.effects.aval import FLOATS
from mla_fx.effects.validate import boolean, integer, one_of
from mla_fx.exchange import all_reduce, all_to_all, combine, gather_heads, local_heads
from mla_fx.parameters import AttentionParams, Cache, QueryLora, QueryPlain
from mla_fx.projections import absorb_query, linear, rms_norm, rope, rope_angles, v_up
from mla_fx.weights import attention_weights, avals, shares

#: How weights may be stored, beside the activations' dtype.
QUANTIZATIONS = ("w8a8",)


@frozen(kw_only=True)
class StepShape:
    """The sizes a program is built for; lengths, slots and tables are inputs and may change at every step.

    `ranks` W, `tokens` T and `requests` B with padding, `blocks` C of `block_size` S in a rank's cache,
    `table_width` M, activation `dtype`; `replicate_query`: every rank projects all heads and nothing is gathered;
    `round_angles`: rotary angles in `dtype` instead of float32, for operators that want them so (`ops.RopeAngles`);
    `quantization` "w8a8": projections take 8-bit weights, all but the absorbed ones, the gate, embedding and head.
    """

    ranks: int = field(default=1, validator=integer(1))
    tokens: int = field(default=1, validator=integer(0))
    requests: int = field(default=1, validator=integer(1))
    blocks: int = field(default=16, validator=integer(1))
    block_size: int = field(default=128, validator=integer(1))
    table_width: int = field(default=16, validator=integer(1))
    dtype: str = field(default="bf16", validator=one_of(*FLOATS))
    replicate_query: bool = field(default=False, validator=boolean)
    round_angles: bool = field(default=False, validator=boolean)
    quantization: str | None = field(default=None, validator=one_of(None, *QUANTIZATIONS))

    @property
    def tp(self) -> Group:
        """Tensor parallelism: who shares heads, columns and rows of the vocabulary."""
        return Group("tp", self.ranks)

    @property
    def dcp(self) -> Group:
        """Decode context parallelism: who shares the sequence."""
        return Group("dcp", self.ranks)

    @property
    def ep(self) -> Group:
        """Expert parallelism: who shares the routed experts."""
        return Group("ep", self.ranks)


def mla_attention(
    x: Value,
    params: AttentionParams[Value],
    cache: Cache[Value],
    angles: tuple[Value, Value],
    batch: Batch[Value, Value],
    *,
    config: MlaConfig,
    shape: StepShape,
) -> tuple[Value, Cache[Value]]:
    """The attention of one layer: normed hidden states `x` [T, D] -> [T, D] and the next version of the cache."""
    heads, scale = params.w_uk.aval.shape[0], config.softmax_scale
    with scope("query"):
        q = query(x, params.query, epsilon=config.latent_norm_eps)
        q_latent = absorb_query(q, params.w_uk, rope=config.qk_rope_head_dim)
        q_rope = rope(q, *angles, heads=heads, name="q_rope")

    with scope("keys"):
        kv = linear(x, params.kv_a_proj, name="kv")
        latent = rms_norm(kv, params.kv_a_layernorm, epsilon=config.latent_norm_eps, name="latent")
        k_rope = rope(kv, *angles, name="k_rope")
        cache = write_cache(cache, latent, k_rope, batch.slots)

    q_all, q_own = spread_heads(q_latent, q_rope, shape=shape)
    hist, hist_lse = history_attention(
        *q_all, cache, batch.block_table, batch.query_lengths, batch.history_lengths, scale=scale
    )
    cur, cur_lse = current_attention(*q_own, latent, k_rope, batch.query_lengths, scale=scale)
    attn = combine(*all_to_all(hist, hist_lse, group=shape.dcp), cur, cur_lse)
    part = linear(v_up(attn, params.w_uv), params.o_proj, name="part")
    return all_reduce(part, group=shape.tp), cache


def query(x: Value, params: QueryLora[Value] | QueryPlain[Value], *, epsilon: float) -> Value:
    """Query projection: down, norm, up; or in one where the model has no low-rank query."""
    if isinstance(params, QueryPlain):
        return linear(x, params.q_proj, name="q")
    down = rms_norm(linear(x, params.q_a_proj, name="q_a"), params.q_a_layernorm, epsilon=epsilon, name="q_a_normed")
    return linear(down, params.q_b_proj, name="q")


def spread_heads(
    q_latent: Value, q_rope: Value, *, shape: StepShape
) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
    """Queries for history (all heads) and for the current part (own heads), by gathering or by slicing."""
    if shape.replicate_query:
        own = (
            local_heads(q_latent, group=shape.dcp, name="q_latent_own"),
            local_heads(q_rope, group=shape.dcp, name="q_rope_own"),
        )
        return (q_latent, q_rope), own
    return gather_heads(q_latent, q_rope, group=shape.dcp), (q_latent, q_rope)


def attention_step(config: MlaConfig, shape: StepShape) -> Step:
    """The attention of one layer as a step: `(params, cache, hidden, batch) -> (out, cache)`."""

    def attention(
        params: AttentionParams[Value], cache: Cache[Value], hidden: Value, batch: Batch[Value, Value]
    ) -> tuple[Value, Cache[Value]]:
        angles = rope_angles(batch.positions, hidden, config=config, rounded=shape.round_angles)
        with scope("attention"):
            return mla_attention(hidden, params, cache, angles, batch, config=config, shape=shape)

    return trace(
        attention,
        step_title("attention_step", config, shape),
        params=parameters(attention_avals(config, shape)),
        cache=cache_avals(config, shape),
        hidden=Aval((shape.tokens, config.hidden_size), shape.dtype),
        batch=batch_avals(shape),
    )


# --- shapes of the inputs ----------------------------------------------------


def attention_avals(config: MlaConfig, shape: StepShape) -> AttentionParams[Aval]:
    """Shapes of one rank's attention parameters; raises `InputError` when the ranks do not divide the heads."""
    own: AttentionParams[Aval] = weight_avals(attention_weights(config, replicate_query=shape.replicate_query), shape)
    return own


def weight_avals(weights: Any, shape: StepShape) -> Any:
    """The pytree `weights` of `Weight` with the shape of a rank's leaf for each."""
    return avals(weights, shares(0, shape.ranks), dtype=shape.dtype, quantization=shape.quantization)


def cache_avals(config: MlaConfig, shape: StepShape) -> Cache[Aval]:
    """Shapes of one rank's cache of one layer."""
    rows = (shape.blocks, shape.block_size)
    return Cache(Aval((*rows, config.kv_lora_rank), shape.dtype), Aval((*rows, config.qk_rope_head_dim), shape.dtype))


def batch_avals(shape: StepShape) -> Batch[Any, Any]:
    """Shapes of what changes at every step: it comes on the host, and lengths stay there."""
    lengths = on_host(Aval((shape.requests,), "int64"))
    return Batch(
        positions=staged(Aval((shape.tokens,), "int64")),
        slots=staged(Aval((shape.tokens,), "int64")),
        block_table=staged(Aval((shape.requests, shape.table_width), "int32")),
        query_lengths=lengths,
        history_lengths=lengths,
    )


def step_title(name: str, config: MlaConfig, shape: StepShape) -> str:
    """The first line of a listing: a name and the sizes."""
    heads = config.num_attention_heads
    sizes = f"T={shape.tokens} B={shape.requests} H={heads} N={heads // shape.ranks} W={shape.ranks}"
    return f"{name}  {sizes} {shape.dtype}"
