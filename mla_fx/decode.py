"""One decode step of MLA under decode context parallelism, composed of the pure functions.

`mla_attention` is the whole attention of a layer; read it first.  What makes a
step of it (`attention_step`) or of a stack of layers (`decode_stack`) only
names the inputs and says their shapes.
"""

from collections.abc import Sequence

from attrs import field, frozen
from attrs.validators import in_

from mla_fx.attention import current_attention, history_attention, write_cache
from mla_fx.batch import Batch
from mla_fx.config import MlaConfig
from mla_fx.effects import Aval, InputError, Step, Value, arguments
from mla_fx.effects.aval import FLOATS
from mla_fx.exchange import all_reduce, all_to_all, combine, gather_heads, local_heads
from mla_fx.parameters import AttentionParams, Cache, LayerParams, QueryLora, QueryPlain
from mla_fx.projections import absorb_query, add, linear, rms_norm, rope, rope_angles, v_up


@frozen(kw_only=True)
class StepShape:
    """The sizes a program is built for; lengths, slots and tables are inputs and may change at every step.

    `ranks` W, `tokens` T and `requests` B with padding, `blocks` C of `block_size` S in a rank's cache,
    `table_width` M, activation `dtype`; `replicate_query`: every rank projects all heads and nothing is gathered.
    """

    ranks: int = 1
    tokens: int = 1
    requests: int = 1
    blocks: int = 16
    block_size: int = 128
    table_width: int = 16
    dtype: str = field(default="bf16", validator=in_(FLOATS))
    replicate_query: bool = False

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
    return Step(_title("attention_step", config, shape), inputs, outputs)


def decode_stack(config: MlaConfig, shape: StepShape, *, layers: int) -> Step:
    """Pre-norm attention with residual, `layers` times: `(params, cache, hidden, batch) -> (hidden, cache)`.

    `params` and `cache` are lists with an entry a layer.
    """
    inputs = arguments(
        params=[layer_avals(config, shape) for _ in range(layers)],
        cache=[cache_avals(config, shape) for _ in range(layers)],
        hidden=Aval((shape.tokens, config.hidden_size), shape.dtype),
        batch=batch_avals(shape),
    )
    hidden, batch = inputs["hidden"], inputs["batch"]
    params: Sequence[LayerParams[Value]] = inputs["params"]
    caches: list[Cache[Value]] = []
    angles = rope_angles(batch.positions, hidden, config=config)
    for layer, cache in zip(params, inputs["cache"], strict=True):
        x = rms_norm(hidden, layer.input_layernorm, epsilon=config.rms_norm_eps, name="x")
        out, cache = mla_attention(x, layer.attention, cache, angles, batch, config=config, shape=shape)
        hidden = add(hidden, out, name="h")
        caches.append(cache)
    return Step(_title(f"decode_stack {layers} layers", config, shape), inputs, (hidden, caches))


# --- shapes of the inputs ----------------------------------------------------


def attention_avals(config: MlaConfig, shape: StepShape) -> AttentionParams[Aval]:
    """Shapes of one rank's attention parameters; raises `InputError` when the ranks do not divide the heads."""
    c, heads = config, config.num_attention_heads
    if heads % shape.ranks:
        raise InputError(f"num_attention_heads: must be a multiple of the ranks, {shape.ranks}: got {heads}")

    def aval(*sizes: int) -> Aval:
        return Aval(sizes, shape.dtype)

    own = heads // shape.ranks
    asked = heads if shape.replicate_query else own
    lora = c.q_lora_rank
    query: QueryLora[Aval] | QueryPlain[Aval] = (
        QueryPlain(aval(asked * c.qk_head_dim, c.hidden_size))
        if lora is None
        else QueryLora(aval(lora, c.hidden_size), aval(lora), aval(asked * c.qk_head_dim, lora))
    )
    return AttentionParams(
        query=query,
        kv_a_proj=aval(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
        kv_a_layernorm=aval(c.kv_lora_rank),
        w_uk=aval(asked, c.qk_nope_head_dim, c.kv_lora_rank),
        w_uv=aval(own, c.kv_lora_rank, c.v_head_dim),
        o_proj=aval(c.hidden_size, own * c.v_head_dim),
    )


def layer_avals(config: MlaConfig, shape: StepShape) -> LayerParams[Aval]:
    """Shapes of one rank's part of a layer."""
    return LayerParams(Aval((config.hidden_size,), shape.dtype), attention_avals(config, shape))


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


def _title(name: str, config: MlaConfig, shape: StepShape) -> str:
    heads = config.num_attention_heads
    sizes = f"T={shape.tokens} B={shape.requests} H={heads} N={heads // shape.ranks} W={shape.ranks}"
    return f"{name}  {sizes} {shape.dtype}"
