"""A DeepSeek model as pure functions on values: decoder layer, stack, head, and the prediction module.

`decoder_layer` is the whole of a layer; read it first.  `model_step` and
`mtp_step` name the inputs, say their shapes, and give a step that any
orchestration can schedule and any backend can run.  The same step prefills,
continues a cached context and decodes: how many tokens of which request are
new is said by the batch.
"""

import re
from collections.abc import Sequence
from typing import Any

from mla_fx.decode import (
    StepShape,
    angles_of,
    batch_avals,
    cache_avals,
    in_parts,
    mla_attention,
    passed,
    step_title,
)
from mla_fx.effects import Aval, Group, Step, Value, parameters, scope, staged, trace
from mla_fx.exchange import all_gather, all_reduce
from mla_fx.feed_forward import mlp, moe
from mla_fx.models.config import ModelConfig
from mla_fx.models.parameters import ModelParams, MtpParams
from mla_fx.models.weights import model_avals, mtp_avals
from mla_fx.parameters import Cache, LayerParams, MoeParams
from mla_fx.projections import add, embedding, linear, rms_norm, take_rows


def decoder_layer(
    hidden: Value,
    params: LayerParams[Value],
    cache: Cache[Value],
    angles: Any,
    batch: Any,
    *,
    config: ModelConfig,
    shape: StepShape,
) -> tuple[Value, Cache[Value]]:
    """Attention and feed-forward, each with a norm before and the residual around it: `hidden` [T, D] -> [T, D].

    `angles` and `batch` are one for each micro-batch where the attention is split.
    """
    epsilon = config.attention.rms_norm_eps
    x = rms_norm(hidden, params.input_layernorm, epsilon=epsilon, name="x")
    with scope("attention"):
        out, cache = in_parts(
            "attention", mla_attention, x, params.attention, cache, angles, batch, config=config.attention, shape=shape
        )
    hidden = add(hidden, out, name="h")
    x = rms_norm(hidden, params.post_attention_layernorm, epsilon=epsilon, name="x")
    with scope("feed_forward"):
        if isinstance(params.feed_forward, MoeParams):
            assert config.moe is not None
            part = moe(x, params.feed_forward, config=config.moe, group=shape.ep, among=shape.tp)
        else:
            part = mlp(x, params.feed_forward)
        out = all_reduce(part, group=shape.tp)
    return add(hidden, out, name="h"), cache


def embed(tokens: Value, table: Value, *, config: ModelConfig, group: Group) -> Value:
    """`tokens` int64 [T] -> [T, D], summed over the ranks' rows of the vocabulary; -1 gives zeros."""
    part = embedding(tokens, table, vocabulary=config.vocab_size, group=group)
    return all_reduce(part, group=group, name="embedded")


def head(hidden: Value, weight: Value, *, config: ModelConfig, group: Group) -> Value:
    """Normed hidden states [O, D] -> logits [O, vocabulary], each rank giving its rows of the vocabulary."""
    with scope("head"):
        part = linear(hidden, weight, name="part")
        return all_gather(part, features=config.vocab_size, group=group, name="logits")


def model_step(config: ModelConfig, shape: StepShape, *, rows: int | None = None, hidden: bool = False) -> Step:
    """The whole model: `(params, cache, tokens, batch) -> (logits, cache)`.

    `params` is `ModelParams`, `cache` a list with an entry a layer, `tokens` int64 [T], logits [T, vocabulary].
    With `rows`, an argument `rows` int64 [rows] follows and logits are of these tokens only.  With `hidden`, the
    normed hidden states [T, D] of all tokens come between: `(logits, hidden, cache)`.  `batch` is a `Batch`, or one for
    each micro-batch where the step is split.
    """

    def model(
        params: ModelParams[Value],
        cache: Sequence[Cache[Value]],
        tokens: Value,
        batch: Any,
        rows: Value | None = None,
    ) -> Any:
        h = embed(tokens, params.embed_tokens, config=config, group=shape.tp)
        angles = angles_of(batch, h, config=config.attention, shape=shape)
        h, caches = in_parts(
            "layers", decoder_stack, h, params.layers, cache, angles, batch, config=config, shape=shape
        )
        normed = rms_norm(h, params.norm, epsilon=config.attention.rms_norm_eps, name="normed")
        last = normed if rows is None else take_rows(normed, rows, name="last")
        logits = head(last, params.lm_head, config=config, group=shape.tp)
        return (logits, normed, caches) if hidden else (logits, caches)

    step = trace(
        model,
        step_title(f"model_step {config.num_hidden_layers} layers", config.attention, shape),
        params=parameters(model_avals(config, shape.plain)),
        cache=[cache_avals(config.attention, shape) for _ in range(config.num_hidden_layers)],
        tokens=staged(Aval((shape.tokens,), "int64")),
        batch=batch_avals(shape),
        **({} if rows is None else {"rows": staged(Aval((rows,), "int64"))}),
    )
    return passed(step, shape)


def decoder_stack(
    hidden: Value,
    layers: Sequence[LayerParams[Value]],
    caches: Sequence[Cache[Value]],
    angles: Any,
    batch: Any,
    *,
    config: ModelConfig,
    shape: StepShape,
) -> tuple[Value, list[Cache[Value]]]:
    """Layer after layer: `hidden` [T, D] -> [T, D] and the next versions of all caches."""
    written: list[Cache[Value]] = []
    for number, (params, cache) in enumerate(zip(layers, caches, strict=True)):
        with scope(f"layers.{number}"):
            hidden, cache = decoder_layer(hidden, params, cache, angles, batch, config=config, shape=shape)
        written.append(cache)
    return hidden, written


def layer_of(tag: str) -> int | None:
    """The number of the layer that an equation with this tag is of; None for what is outside of layers.

    >>> layer_of("batch.0.layers.3.attention"), layer_of("head")
    (3, None)
    """
    found = re.search(r"\blayers\.(\d+)\b", tag)
    return int(found[1]) if found else None


def mtp_step(config: ModelConfig, shape: StepShape, *, given: int, rows: int) -> Step:
    """Multi-token prediction: `(params, cache, tokens, hidden, sources, batch, rows) -> (logits, hidden, cache)`.

    Row t of the batch stands at position p and takes the token of position p + 1, `tokens` int64 [T], and the hidden
    state of position p, row `sources`[t] of `hidden` [given, D]; its logits are for position p + 2.

        x[t] = eh_proj . (rms_norm(embedding(tokens[t]), enorm) ++ rms_norm(hidden[sources[t]], hnorm))

    goes through one decoder layer with a cache of its own.  `hidden` is what `model_step` returns, after the final
    norm; the hidden states returned, before the norm of the head, feed the next prediction.  `rows` as in `model_step`.
    Position 0 has the embedding zero (token -1), as in vLLM.  Source: DeepSeek-V3, section 2.2.
    """
    c = config.attention

    def mtp(
        params: MtpParams[Value],
        cache: Cache[Value],
        tokens: Value,
        hidden: Value,
        sources: Value,
        batch: Any,
        rows: Value,
    ) -> Any:
        embedded = embed(tokens, params.embed_tokens, config=config, group=shape.tp)
        embedded = rms_norm(embedded, params.enorm, epsilon=c.rms_norm_eps, name="e")
        before = take_rows(hidden, sources, name="before")
        before = rms_norm(before, params.hnorm, epsilon=c.rms_norm_eps, name="h")
        # One product over the concatenation is the sum of a product over each half.
        halves = [linear(x, weight, name="half") for x, weight in zip((embedded, before), params.eh_proj, strict=True)]
        h = all_gather(add(*halves, name="part"), features=c.hidden_size, group=shape.tp, name="x")
        angles = angles_of(batch, h, config=c, shape=shape)
        with scope(f"layers.{config.num_hidden_layers}"):
            h, cache = in_parts(
                "layers", decoder_layer, h, params.layer, cache, angles, batch, config=config, shape=shape
            )
        normed = rms_norm(take_rows(h, rows, name="last"), params.norm, epsilon=c.rms_norm_eps, name="normed")
        return head(normed, params.lm_head, config=config, group=shape.tp), h, cache

    step = trace(
        mtp,
        step_title("mtp_step", c, shape),
        params=parameters(mtp_avals(config, shape.plain)),
        cache=cache_avals(c, shape),
        tokens=staged(Aval((shape.tokens,), "int64")),
        hidden=Aval((given, c.hidden_size), shape.dtype),
        sources=staged(Aval((shape.tokens,), "int64")),
        batch=batch_avals(shape),
        rows=staged(Aval((rows,), "int64")),
    )
    return passed(step, shape)
