"""What each rank of a deployment holds, from a model's configuration alone: nothing is read, nothing allocated.

    weights    the leaves of a rank's parameters, as a load makes them: shares that do not divide are padded, so that
               all ranks hold as much.  Whether a prediction module has an embedding and a head of its own, only a
               checkpoint tells: they are counted
    cache      a row of each layer, and of the prediction module, for every position that a rank has room for: whole
               blocks for each request
    values     the most that values of a step take at once (`mla_fx.effects.cost`), over the steps that an engine runs:
               one that decodes, one that fills in prompts, and the prediction module's, beside what it is handed
    staging    what a step sends to the device, each in a buffer of its own; every compiled size has such buffers
    workspace  the scratch of the attention operators, which only they can tell: it is what the plan is given

What a rule makes for itself, what an allocator loses to its blocks, and the buffers of a transport are no part of it:
the `reserve` is for them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import torch.utils._pytree as pytree
from attrs import evolve, field, frozen
from attrs.validators import optional

from mla_fx import orchestrations
from mla_fx.decode import StepShape, cache_avals
from mla_fx.effects import Aval, Cost, InputError, Orchestration, Step, cost, schedule
from mla_fx.effects.validate import integer
from mla_fx.models.chunks import chunk_of, expands, round_up
from mla_fx.models.config import ModelConfig
from mla_fx.models.stack import layer_of, model_step, mtp_step
from mla_fx.models.weights import model_avals, mtp_avals
from mla_fx.parameters import LayerParams, MoeParams
from mla_fx.sharding import Sharding

#: Layers of a kind that a step is priced with: values of all further ones live and die as those of the last of these
#: do.  A value on a stream of its own may be let go a layer later, so it takes one more than two.
ENOUGH: Final = 3


@frozen(kw_only=True)
class Plan:
    """`shape.requests` requests of `context` tokens each, at most `chunk` tokens a step, with `drafts` of the module.

    Without a `chunk` a step has as many as an engine gives it (`tokens`).
    `shape` says ranks, dtype, block size and the form of the weights; its tokens, blocks and table do not matter.
    `workspace` and `reserve` are bytes that are not known from the configuration.  All sizes are bytes on a rank.
    Raises `InputError` for what a model cannot serve.
    """

    config: ModelConfig
    shape: StepShape
    context: int = field(validator=integer(1))
    chunk: int | None = field(default=None, validator=optional(integer(1)))
    drafts: int = field(default=0, validator=integer(0))
    workspace: int = field(default=0, validator=integer(0))
    reserve: int = field(default=0, validator=integer(0))
    orchestration: Orchestration = orchestrations.attention_aside
    prefill_orchestration: Orchestration = orchestrations.serial

    def __attrs_post_init__(self) -> None:
        if self.drafts and not self.config.num_nextn_predict_layers:
            raise InputError(
                f"drafts: must be 0 for a model without prediction layers (num_nextn_predict_layers): got {self.drafts}"
            )

    @property
    def blocks(self) -> int:
        """Cache blocks that a request of `context` tokens takes on a rank."""
        return Sharding(ranks=self.shape.dcp.size, block_size=self.shape.block_size).blocks(self.context)

    @property
    def tokens(self) -> int:
        """Of a step, at most: `chunk`, or what an engine takes that has room for the context of each request."""
        if self.chunk is not None:
            return max(self.chunk, self.shape.requests)
        return chunk_of(self.config.attention, evolve(self.shape, table_width=self.blocks))

    @property
    def weights(self) -> Mapping[str, int]:
        """By what they are of."""
        return _weights(self.config, _plain(self.shape), self.drafts > 0)

    @property
    def cache(self) -> int:
        """Of all requests, each of which has whole blocks."""
        return self.shape.requests * self.blocks * self.block

    @property
    def block(self) -> int:
        """A block of the table, in all layers."""
        one = cache_avals(self.config.attention, evolve(self.shape, blocks=1))
        layers = self.config.num_hidden_layers + (1 if self.drafts else 0)
        return layers * sum(aval.bytes_ for aval in one)

    @property
    def values(self) -> int:
        """The most at once, of all steps."""
        return max(step.held + step.cost.memory.peak for step in self.steps())

    @property
    def staging(self) -> int:
        """Of the step that sends most: tokens, positions, slots, rows, and a table for each micro-batch."""
        column = Aval((self.shape.requests, 1), "int32").bytes_
        more = column * (self.blocks - 1)
        return max(step.cost.memory.data + more * len(step.shape.parts) for step in self.steps())

    @property
    def total(self) -> int:
        """What a rank holds in all, the reserve with it."""
        known = sum(self.weights.values()) + self.cache + self.values + self.staging
        return known + self.workspace + self.reserve

    @property
    def sent(self) -> int:
        """Bytes that a rank sends over the wire in a step in which every request decodes."""
        few = alike(self.config)
        by_layer: dict[int | None, int] = defaultdict(int)
        for message in next(self.steps()).cost.messages:
            by_layer[layer_of(message.launch.tag)] += message.sent
        by_kind = {few.is_moe(layer): by_layer[layer] for layer in range(few.num_hidden_layers)}
        layers = range(self.config.num_hidden_layers)
        return by_layer[None] + sum(by_kind[self.config.is_moe(layer)] for layer in layers)

    def steps(self) -> Iterator["Priced"]:
        """Every step that an engine runs at its fullest."""
        rows = min(self.shape.requests * (1 + self.drafts), self.tokens)
        for tokens, chosen in ((rows, self.orchestration), (self.tokens, self.prefill_orchestration)):
            for shape in self._shapes(tokens, chosen):
                sizes = (self.config, shape, round_up(rows), chosen)
                yield Priced(shape, 0, _priced(_model, *sizes))
                if self.drafts:  # a second draft is made beside what the model and the first one's step handed on
                    given = _bytes(self.config, shape, round_up(rows)) * min(self.drafts, 2)
                    yield Priced(shape, given, _priced(_module, *sizes))

    def _shapes(self, tokens: int, chosen: Orchestration) -> Iterator[StepShape]:
        """The shape that the runner compiles for so many tokens, and the one that expands a prompt where it would."""
        size = max(round_up(tokens), 2 if chosen.split else 1)
        shape = evolve(_plain(self.shape), tokens=size, split=chosen.split)
        yield shape
        if chosen is self.prefill_orchestration and expands(self.config.attention, shape, [tokens]):
            yield evolve(shape, project_before_merge=True, expand_current=True)


@frozen
class Priced:
    """A step's shape, what it costs, and bytes of values that are `held` beside it."""

    shape: StepShape
    held: int
    cost: Cost


def largest_context(plan: Plan, memory: int) -> int:
    """The most tokens that every request may have in `memory` bytes a rank, in whole blocks; 0 where not one fits.

    A model's own limit (max_position_embeddings) does not count here.
    """
    unit = plan.shape.block_size * plan.shape.dcp.size
    return unit * _most(lambda blocks: evolve(plan, context=blocks * unit).total <= memory)


def most_requests(plan: Plan, memory: int) -> int:
    """The most requests of `plan.context` tokens each in `memory` bytes a rank; 0 where not one fits."""
    return _most(lambda count: evolve(plan, shape=evolve(plan.shape, requests=count)).total <= memory)


def _most(fits: Callable[[int], bool]) -> int:
    """The largest count that fits, 0 for none; what does not fit fits no better when it is larger."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# --- weights ---------------------------------------------------------------------------------------


@lru_cache
def _weights(config: ModelConfig, shape: StepShape, module: bool) -> Mapping[str, int]:
    model = model_avals(config, shape)
    found: dict[str, int] = {}

    def add(kind: str, tree: Any) -> None:
        found[kind] = found.get(kind, 0) + sum(aval.bytes_ for aval in pytree.tree_leaves(tree))

    for layer in model.layers:
        for kind, tree in _kinds(layer):
            add(kind, tree)
    add("norms", model.norm)
    add("embedding", model.embed_tokens)
    add("head", () if config.tie_word_embeddings else model.lm_head)
    if module:
        own = mtp_avals(config, shape)
        add("prediction module", (own.enorm, own.hnorm, own.eh_proj, own.layer, own.norm))
        add("its embedding and head", (own.embed_tokens, own.lm_head))
    return {kind: count for kind, count in found.items() if count}


def _kinds(layer: LayerParams[Aval]) -> Iterator[tuple[str, Any]]:
    """A layer's parameters by what they are of."""
    yield "attention", layer.attention
    inner = layer.feed_forward
    if isinstance(inner, MoeParams):
        yield "experts", (inner.gate_up_proj, inner.down_proj)
        yield "shared experts", inner.shared_experts
        yield "gates", (inner.gate, inner.e_score_correction_bias)
    else:
        yield "dense networks", inner
    yield "norms", (layer.input_layernorm, layer.post_attention_layernorm)


# --- steps -----------------------------------------------------------------------------------------


def _plain(shape: StepShape) -> StepShape:
    """Without the sizes that neither weights nor values depend on, so that what is priced once serves all."""
    return evolve(shape, tokens=1, blocks=1, table_width=1, split=None)


def alike(config: ModelConfig) -> ModelConfig:
    """The model with `ENOUGH` layers of each kind, dense ones first, whose steps hold as much at their peak."""
    count, dense = config.num_hidden_layers, min(config.first_k_dense_replace, config.num_hidden_layers)
    if config.moe is None:
        return evolve(config, num_hidden_layers=min(count, ENOUGH))
    if config.moe_layer_freq > 1:
        return config
    first = min(dense, ENOUGH)
    return evolve(config, num_hidden_layers=first + min(count - dense, ENOUGH), first_k_dense_replace=first)


def _model(config: ModelConfig, shape: StepShape, rows: int) -> Step:
    return model_step(alike(config), shape, rows=rows, hidden=True)


def _module(config: ModelConfig, shape: StepShape, rows: int) -> Step:
    return mtp_step(config, shape, given=shape.tokens, rows=rows)


@lru_cache
def _priced(
    make: Callable[[ModelConfig, StepShape, int], Step],
    config: ModelConfig,
    shape: StepShape,
    rows: int,
    chosen: Orchestration,
) -> Cost:
    """What a step costs; the module's hidden states are counted with what it is handed, not as its data."""
    found = cost(schedule(make(config, shape, rows), chosen))
    if make is _model:
        return found
    given = Aval((shape.tokens, config.attention.hidden_size), shape.dtype).bytes_
    return evolve(found, memory=evolve(found.memory, data=found.memory.data - given))


def _bytes(config: ModelConfig, shape: StepShape, rows: int) -> int:
    """What a step hands on: logits of `rows` tokens and hidden states of all."""
    return (
        Aval((rows, config.vocab_size), shape.dtype).bytes_
        + Aval((shape.tokens, config.attention.hidden_size), shape.dtype).bytes_
    )
