"""One decode step of MLA under decode context parallelism, composed of the pure functions.

`mla_attention` is the whole attention of a layer; read it first.  What makes a
step of it (`attention_step`) only names the inputs and says their shapes.
`mla_fx.models` stacks layers to a model.

A step may be split into two micro-batches: the first half of its tokens, and
the rest.  `in_parts` calls a function on each half in turn, with the half's own
lengths and table; a request that is cut goes on in the second half, where what
the first has written to the cache is history.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from attrs import evolve, field, frozen

from mla_fx.attention import current_attention, history_attention, write_cache
from mla_fx.batch import Batch, Planned, plan_batch, plan_parts
from mla_fx.config import MlaConfig
from mla_fx.effects import Aval, Group, InputError, Step, Value, on_host, ops, parameters, scope, staged, trace
from mla_fx.effects.aval import FLOATS
from mla_fx.effects.validate import boolean, integer, one_of, word
from mla_fx.exchange import all_reduce, all_to_all, combine, gather_heads
from mla_fx.layout import Layout, layout_of
from mla_fx.parameters import AttentionParams, Cache, QueryLora, QueryPlain
from mla_fx.passes import expand_current, project_before_merge, replicate_query
from mla_fx.projections import absorb_query, join_tokens, linear, rms_norm, rope, rope_angles, split_tokens, v_up
from mla_fx.sharding import Sharding
from mla_fx.weights import Form, attention_weights, avals, shares

#: How weights may be stored, beside the activations' dtype.
QUANTIZATIONS = ("w8a8",)
#: Scopes that a step may run in two micro-batches: the attention of each layer, or all layers from first to last.
SPLITS: Final = ("attention", "layers")

#: What a function on tokens updates: the cache of a layer, or those of several.
Caches = TypeVar("Caches")


@frozen(kw_only=True)
class StepShape:
    """The sizes a program is built for; lengths, slots and tables are inputs and may change at every step.

    `ranks` W, or a `Layout` of them, which is the attribute `layout`; `tokens` T and `requests` B of a replica with
    padding, `blocks` C of `block_size` S in a rank's cache, `table_width` M, activation `dtype`; `replicate_query`,
    `project_before_merge` and, beside this one, `expand_current`: the passes of these names (`mla_fx.passes`);
    `round_angles`: rotary angles in `dtype` instead of float32, for operators that want them so (`ops.RopeAngles`);
    `quantization` "w8a8": projections take 8-bit weights, all but the absorbed ones, the gate, embedding and head;
    `split`: the scope that runs in two micro-batches (`SPLITS`), each with a batch of its own; `workspace`: the scratch
    of the attention operators, by name.
    """

    layout: Layout = field(default=Layout(), converter=layout_of, alias="ranks")
    tokens: int = field(default=1, validator=integer(0))
    requests: int = field(default=1, validator=integer(1))
    blocks: int = field(default=16, validator=integer(1))
    block_size: int = field(default=128, validator=integer(1))
    table_width: int = field(default=16, validator=integer(1))
    dtype: str = field(default="bf16", validator=one_of(*FLOATS))
    replicate_query: bool = field(default=False, validator=boolean)
    project_before_merge: bool = field(default=False, validator=boolean)
    expand_current: bool = field(default=False, validator=boolean)
    round_angles: bool = field(default=False, validator=boolean)
    quantization: str | None = field(default=None, validator=one_of(None, *QUANTIZATIONS))
    split: str | None = field(default=None, validator=one_of(None, *SPLITS))
    workspace: str = field(default=ops.WORKSPACE, validator=word)

    def __attrs_post_init__(self) -> None:
        if self.split and self.tokens < 2:
            raise InputError(f"tokens: must be at least 2 to be split into micro-batches: got {self.tokens}")
        if self.expand_current and not self.project_before_merge:
            raise InputError("expand_current: must go with project_before_merge=True: got True without it")

    @property
    def ranks(self) -> int:
        """All ranks of the layout."""
        return self.layout.size

    @property
    def tp(self) -> Group:
        """Tensor parallelism: who shares heads, columns and rows of the vocabulary."""
        return self.layout.group("tp")

    @property
    def dcp(self) -> Group:
        """Decode context parallelism: who shares the sequence."""
        return self.layout.group("dcp")

    @property
    def ep(self) -> Group:
        """Expert parallelism: who shares the routed experts."""
        return self.layout.group("ep")

    @property
    def form(self) -> Form:
        """The form that the attention's weights are in, as `mla_fx.weights` is asked for it."""
        return {"replicate_query": self.replicate_query, "project_before_merge": self.project_before_merge}

    @property
    def plain(self) -> "StepShape":
        """The step as it is composed, before passes."""
        return evolve(self, replicate_query=False, project_before_merge=False, expand_current=False)

    @property
    def parts(self) -> tuple["StepShape", ...]:
        """The two micro-batches of a step that is split, each with a workspace of its own; else the step."""
        if self.split is None:
            return (self,)
        half = -(-self.tokens // 2)
        return tuple(
            evolve(self, tokens=tokens, split=None, workspace=f"{self.workspace}_{k}")
            for k, tokens in enumerate((half, self.tokens - half))
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

    q_all = gather_heads(q_latent, q_rope, group=shape.dcp)
    scratch = shape.workspace
    hist, hist_lse = history_attention(
        *q_all,
        cache,
        batch.block_table,
        batch.query_lengths,
        batch.history_lengths,
        scale=scale,
        workspace=scratch,
    )
    cur, cur_lse = current_attention(
        q_latent, q_rope, latent, k_rope, batch.query_lengths, scale=scale, workspace=scratch
    )
    attn = combine(*all_to_all(hist, hist_lse, group=shape.dcp), cur, cur_lse)
    part = linear(v_up(attn, params.w_uv), params.o_proj, name="part")
    return all_reduce(part, group=shape.tp), cache


def query(x: Value, params: QueryLora[Value] | QueryPlain[Value], *, epsilon: float) -> Value:
    """Query projection: down, norm, up; or in one where the model has no low-rank query."""
    if isinstance(params, QueryPlain):
        return linear(x, params.q_proj, name="q")
    down = rms_norm(linear(x, params.q_a_proj, name="q_a"), params.q_a_layernorm, epsilon=epsilon, name="q_a_normed")
    return linear(down, params.q_b_proj, name="q")


def in_parts(
    split: str,
    function: Callable[..., tuple[Value, Caches]],
    x: Value,
    params: Any,
    cache: Caches,
    angles: Any,
    batch: Any,
    *,
    config: Any,
    shape: StepShape,
) -> tuple[Value, Caches]:
    """`function(x, params, cache, angles, batch)` on tokens `x` [T, D] -> [T, D] and the next version of the cache.

    Where the step is split at `split`, on each micro-batch in turn, with its own entry of `angles` and `batch`; the
    second takes the cache as the first leaves it.  Equations get the scopes "batch.0" and "batch.1".
    """
    if shape.split != split:
        return function(x, params, cache, angles, batch, config=config, shape=shape)
    outs = []
    for k, (part, own) in enumerate(zip(shape.parts, split_tokens(x, count=shape.parts[0].tokens), strict=True)):
        with scope(f"batch.{k}"):
            out, cache = function(own, params, cache, angles[k], batch[k], config=config, shape=part)
        outs.append(out)
    return join_tokens(*outs), cache


def angles_of(batch: Any, like: Value, *, config: MlaConfig, shape: StepShape) -> Any:
    """Cosine and sine of a batch's positions, or of each micro-batch's: see `rope_angles`."""
    if shape.split is None:
        return rope_angles(batch.positions, like, config=config, rounded=shape.round_angles)
    return [rope_angles(part.positions, like, config=config, rounded=shape.round_angles) for part in batch]


def attention_step(config: MlaConfig, shape: StepShape) -> Step:
    """The attention of one layer as a step: `(params, cache, hidden, batch) -> (out, cache)`.

    `batch` is a `Batch`, or one for each micro-batch where the attention is split.
    """
    if shape.split not in (None, "attention"):
        raise InputError(f"split: the attention of one layer can be split as 'attention': got {shape.split!r}")

    def attention(
        params: AttentionParams[Value], cache: Cache[Value], hidden: Value, batch: Any
    ) -> tuple[Value, Cache[Value]]:
        angles = angles_of(batch, hidden, config=config, shape=shape)
        with scope("attention"):
            return in_parts(
                "attention", mla_attention, hidden, params, cache, angles, batch, config=config, shape=shape
            )

    step = trace(
        attention,
        step_title("attention_step", config, shape),
        params=parameters(attention_avals(config, shape.plain)),
        cache=cache_avals(config, shape),
        hidden=Aval((shape.tokens, config.hidden_size), shape.dtype),
        batch=batch_avals(shape),
    )
    return passed(step, shape)


def passed(step: Step, shape: StepShape) -> Step:
    """A step as it was composed, after the passes that its shape asks for."""
    step = replicate_query(step) if shape.replicate_query else step
    step = project_before_merge(step) if shape.project_before_merge else step
    return expand_current(step) if shape.expand_current else step


# --- shapes of the inputs ----------------------------------------------------


def attention_avals(config: MlaConfig, shape: StepShape) -> AttentionParams[Aval]:
    """Shapes of one rank's attention parameters; raises `InputError` when the ranks do not divide the heads."""
    own: AttentionParams[Aval] = weight_avals(attention_weights(config, **shape.form), shape)
    return own


def weight_avals(weights: Any, shape: StepShape) -> Any:
    """The pytree `weights` of `Weight` with the shape of a rank's leaf for each."""
    return avals(weights, shares(0, shape.layout), dtype=shape.dtype, quantization=shape.quantization)


def cache_avals(config: MlaConfig, shape: StepShape) -> Cache[Aval]:
    """Shapes of one rank's cache of one layer."""
    rows = (shape.blocks, shape.block_size)
    return Cache(Aval((*rows, config.kv_lora_rank), shape.dtype), Aval((*rows, config.qk_rope_head_dim), shape.dtype))


def batch_avals(shape: StepShape) -> Any:
    """Shapes of what changes at every step: it comes on the host, and lengths stay there.

    A `Batch`, or one for each micro-batch.
    """
    if shape.split:
        return tuple(batch_avals(part) for part in shape.parts)
    lengths = on_host(Aval((shape.requests,), "int64"))
    return Batch(
        positions=staged(Aval((shape.tokens,), "int64")),
        slots=staged(Aval((shape.tokens,), "int64")),
        block_table=staged(Aval((shape.requests, shape.table_width), "int32")),
        query_lengths=lengths,
        history_lengths=lengths,
    )


def plan_step(
    sharding: Sharding,
    shape: StepShape,
    *,
    history: Sequence[int],
    query: Sequence[int],
    block_table: torch.Tensor | Sequence[Sequence[int]],
) -> list[Planned] | list[tuple[Planned, ...]]:
    """The batches of a context group, rank after rank, as a step of this shape takes them.

    They are those of `plan_batch`, or of `plan_parts` where the step is split.  A rank takes that of its replica's
    requests with its number in the group, `layout.index("dcp", rank)`.
    """
    sizes = {"blocks": shape.blocks, "requests": shape.requests, "table_width": shape.table_width}
    given: dict[str, Any] = {"history": history, "query": query, "block_table": block_table, **sizes}
    if shape.split is None:
        return plan_batch(sharding, tokens=shape.tokens, **given)
    return plan_parts(sharding, tokens=[part.tokens for part in shape.parts], **given)


def step_title(name: str, config: MlaConfig, shape: StepShape) -> str:
    """The first line of a listing: a name and the sizes."""
    heads, layout = config.num_attention_heads, shape.layout
    sizes = f"T={shape.tokens} B={shape.requests} H={heads} N={heads // layout.tp} W={layout.dcp}"
    return f"{name}  {sizes} {shape.dtype}" + ("" if layout == layout_of(layout.size) else f"  {layout}")
