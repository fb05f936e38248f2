"""`mla-fx decode`: a prompt, then decode steps, on one backend and beside it on the reference."""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from tqdm import tqdm

from mla_fx import MlaConfig, Sharding, StepShape, backends, decode_stack, plan_batch
from mla_fx.backends import Backend
from mla_fx.backends.inputs import DTYPES
from mla_fx.effects import InputError, schedule
from mla_fx.models import Checkpoint, small_config
from mla_fx.parameters import LayerParams, empty_cache, random_attention, shard_attention

#: Prompt tokens that go through the layers at a time.
CHUNK = 64


@frozen
class Model:
    """Where the layers come from: how many, their sizes, one rank's part of them, and the embedding of tokens."""

    name: str
    config: MlaConfig
    layers: int
    vocabulary: int
    load: Callable[[int], list[LayerParams[torch.Tensor]]]
    embed: Callable[[Sequence[int]], torch.Tensor]


@define
class Lane:
    """A backend with everything it needs: compiled programs, parameters, and its own caches."""

    backend: Backend
    chunk: Callable[..., Any]
    step: Callable[..., Any]
    params: Any
    caches: Any
    seconds: float = field(default=0.0)

    def run(self, program: Callable[..., Any], hidden: torch.Tensor, batches: list[Any]) -> torch.Tensor:
        """Hidden states of rank 0 after all layers; time is added up."""
        ranks = [self.backend.put(hidden)] * self.backend.ranks
        start = time.perf_counter()
        out, self.caches = program(self.params, self.caches, ranks, batches)
        self.seconds += time.perf_counter() - start
        first: torch.Tensor = out[0]
        return first


def decode(options: argparse.Namespace, placement: Callable[..., str]) -> int:
    """Run the command with parsed options; returns the exit status."""
    if options.prompt < 0:
        raise InputError(f"--prompt: must be at least 0: got {options.prompt}")
    sharding = Sharding(ranks=options.ranks, interleave=options.interleave, block_size=options.block_size)
    model = _model(options)
    total = options.prompt + options.steps * options.new_tokens
    per_request = sharding.blocks(total)
    sizes = {
        "ranks": options.ranks,
        "requests": options.requests,
        "blocks": options.requests * per_request,
        "block_size": options.block_size,
        "table_width": per_request,
        "dtype": options.dtype,
        "replicate_query": options.replicate_query,
    }
    shapes = [
        StepShape(tokens=options.requests * n, **sizes) for n in (min(CHUNK, options.prompt) or 1, options.new_tokens)
    ]
    programs = [
        schedule(decode_stack(model.config, shape, layers=model.layers), placement, mode=options.mode)
        for shape in shapes
    ]
    config = model.config
    print(f"{model.name}: {model.layers} layers, {config.num_attention_heads} heads, latent {config.kv_lora_rank}")
    print(f"{options.backend}, {options.ranks} ranks, {options.dtype}, {programs[1].orchestration} ({options.mode})")

    made = backends.get(options.backend, ranks=options.ranks, adversary=options.adversary)
    lanes = [_lane(made, programs, model, shapes[1])]
    if not options.no_reference:
        lanes.append(_lane(backends.get("reference", ranks=options.ranks), programs, model, shapes[1]))
    deviation = _run(lanes, model, sharding, shapes, options)

    tokens = options.steps * options.requests * options.new_tokens
    print(f"{tokens} tokens in {lanes[0].seconds:.2f} s: {tokens / lanes[0].seconds:.1f} tokens per second")
    if deviation is not None:
        print(f"largest deviation from reference: {deviation:.3g} of the hidden states' root mean square")
    return 0


def _run(
    lanes: list[Lane], model: Model, sharding: Sharding, shapes: list[StepShape], options: argparse.Namespace
) -> float | None:
    """Prompt and steps on every lane; the largest relative deviation of the first from the second, if there are two."""
    generator = torch.Generator().manual_seed(options.seed)
    requests, per_request = options.requests, shapes[0].table_width
    table = [list(range(b * per_request, (b + 1) * per_request)) for b in range(requests)]
    worst, done = 0.0, 0
    pieces = [(n, False) for n in _chunks(options.prompt)] + [(options.new_tokens, True)] * options.steps
    with tqdm(total=len(pieces), unit="step", desc="prompt", leave=False, disable=None) as bar:
        for new, decoding in pieces:
            shape = shapes[decoding]
            batches = plan_batch(
                sharding,
                history=[done] * requests,
                query=[new] * requests,
                block_table=table,
                blocks=shape.blocks,
                tokens=shape.tokens,
                requests=requests,
                table_width=per_request,
            )
            ids = torch.randint(model.vocabulary, (shape.tokens,), generator=generator).tolist()
            hidden = model.embed(ids)
            bar.set_description("decode" if decoding else "prompt")
            if done == options.prompt and decoding:
                for lane in lanes:
                    lane.seconds = 0.0
            found = [lane.run(lane.step if decoding else lane.chunk, hidden, batches) for lane in lanes]
            used = slice(new * requests)
            if len(found) == 2:
                exact = found[1][used]
                difference = (found[0][used].double() - exact).abs().max() / exact.square().mean().sqrt()
                worst = max(worst, float(difference))
            done += new
            bar.update()
    return worst if len(lanes) == 2 else None


def _chunks(prompt: int) -> list[int]:
    whole, rest = divmod(prompt, CHUNK)
    return [CHUNK] * whole + [rest] * bool(rest)


def _lane(backend: Backend, programs: list[Any], model: Model, shape: StepShape) -> Lane:
    ranks = range(backend.ranks)
    dtype = DTYPES[backend.dtype or shape.dtype]
    caches = [
        empty_cache(model.config, blocks=shape.blocks, block_size=shape.block_size, dtype=dtype, layers=model.layers)
        for _ in ranks
    ]
    chunk, step = (backend.compile(program) for program in programs)
    return Lane(backend, chunk, step, backend.put([model.load(rank) for rank in ranks]), caches)


def _model(options: argparse.Namespace) -> Model:
    dtype = DTYPES[options.dtype]
    sharded = {"ranks": options.ranks, "replicate_query": options.replicate_query}
    if options.model:
        checkpoint = Checkpoint.open(options.model)
        layers = checkpoint.config.num_hidden_layers
        return Model(
            options.model,
            checkpoint.config.attention,
            layers,
            checkpoint.config.vocab_size,
            lambda rank: [checkpoint.load_layer(k, rank=rank, dtype=dtype, **sharded) for k in range(layers)],
            lambda ids: checkpoint.embed(ids, dtype=dtype),
        )
    generator = torch.Generator().manual_seed(options.seed)
    small = small_config()
    config, vocabulary = small.attention, small.vocab_size
    full = [random_attention(config, generator=generator, dtype=dtype) for _ in range(small.num_hidden_layers)]
    norm = torch.ones(config.hidden_size, dtype=dtype)
    table = torch.randn(vocabulary, config.hidden_size, generator=generator).to(dtype)
    return Model(
        "built-in small configuration",
        config,
        len(full),
        vocabulary,
        lambda rank: [LayerParams(norm, shard_attention(f, config, rank=rank, **sharded)) for f in full],
        lambda ids: table[list(ids)],
    )
