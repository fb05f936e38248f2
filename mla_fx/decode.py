"""One decode step of MLA under decode context parallelism, composed of the pure functions.

`mla_attention` is the whole attention of a layer; read it first.  What makes a
step of it (`attention_step`) only names the inputs and says their shapes.
`mla_fx.models` stacks layers to a model.
"""

from typing import Any

from attrs import field, frozen
from attrs.validators import in_, optional

from mla_fx.attention import current_attention, history_attention, write_cache
from mla_fx.batch import Batch
from mla_fx.config import MlaConfig
from mla_fx.effects import Aval, InputError, Step, Value, arguments
from mla_fx.effects.aval import FLOATS
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
    `quantization` "w8a8": projections take 8-bit weights, all but the absorbed ones, the gate, embedding and head.
    """

    ranks: int = 1
    tokens: int = 1
    requests: int = 1
    blocks: int = 16
    block_size: int = 128
    table_width: int = 16
    dtype: str = field(default="bf16", validator=in_(FLOATS))
    replicate_query: bool = False
    quantization: str | None = field(default=None, validator=optional(in_(QUANTIZATIONS)))

    def __attrs_post_init__(self) -> None:
        for name in ("ranks", "tokens", "requests", "blocks", "block_size", "table_width"):
            if not isinstance(value := getattr(self, name), int) or value < (0 if name == "tokens" else 1):
                raise InputError(
                    f"{name}: must be an integer of at least {0 if name == 'tokens' else 1}: got {value!r}"
                )


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
    ranks, heads, scale = shape.ranks, params.w_uk.aval.shape[0], config.softmax_scale

    q = query(x, params.query, epsilon=config.latent_norm_eps)
    q_latent = absorb_query(q, params.w_uk, rope=config.qk_rope_head_dim)
    q_rope = rope(q, *angles, heads=heads, name="q_rope")

    kv = linear(x, params.kv_a_proj, name="kv")
    latent = rms_norm(kv, params.kv_a_layernorm, epsilon=config.latent_norm_eps, name="latent")
    k_rope = rope(kv, *angles, name="k_rope")
    cache = write_cache(cache, latent, k_rope, batch.slots)

    q_all, q_own = spread_heads(q_latent, q_rope, shape=shape)
    hist, hist_lse = history_attention(
        *q_all, cache, batch.block_table, batch.query_lengths, batch.history_lengths, scale=scale
    )
    cur, cur_lse = current_attention(*q_own, latent, k_rope, batch.query_lengths, scale=scale)
    recv = all_to_all(hist, hist_lse, ranks=ranks)
    attn = combine(recv, cur, cur_lse)
    return all_reduce(linear(v_up(attn, params.w_uv), params.o_proj, name="part")), cache


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
            local_heads(q_latent, ranks=shape.ranks, name="q_latent_own"),
            local_heads(q_rope, ranks=shape.ranks, name="q_rope_own"),
        )
        return (q_latent, q_rope), own
    return gather_heads(q_latent, q_rope, ranks=shape.ranks), (q_latent, q_rope)


def attention_step(config: MlaConfig, shape: StepShape) -> Step:
    """The attention of one layer as a step: `(params, cache, hidden, batch) -> (out, cache)`."""
    inputs = arguments(
        params=attention_avals(config, shape),
        cache=cache_avals(config, shape),
        hidden=Aval((shape.tokens, config.hidden_size), shape.dtype),
        batch=batch_avals(shape),
    )
    hidden, batch = inputs["hidden"], inputs["batch"]
    angles = rope_angles(batch.positions, hidden, config=config)
    outputs = mla_attention(hidden, inputs["params"], inputs["cache"], angles, batch, config=config, shape=shape)
    return Step(step_title("attention_step", config, shape), inputs, outputs)


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


def batch_avals(shape: StepShape) -> Batch[Aval, Aval]:
    """Shapes of what changes at every step."""
    return Batch(
        positions=Aval((shape.tokens,), "int64"),
        slots=Aval((shape.tokens,), "int64"),
        block_table=Aval((shape.requests, shape.table_width), "int32"),
        query_lengths=Aval((shape.requests,), "host"),
        history_lengths=Aval((shape.requests,), "host"),
    )


def step_title(name: str, config: MlaConfig, shape: StepShape) -> str:
    """The first line of a listing: a name and the sizes."""
    heads = config.num_attention_heads
    sizes = f"T={shape.tokens} B={shape.requests} H={heads} N={heads // shape.ranks} W={shape.ranks}"
    return f"{name}  {sizes} {shape.dtype}"
