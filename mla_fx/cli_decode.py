"""`mla-fx decode`: prompts, then decode steps, on one backend and beside it on the reference."""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence

import torch
from attrs import define, evolve, field
from tqdm import tqdm

from mla_fx import StepShape, backends
from mla_fx.backends.meter import Metered
from mla_fx.cli_backend import chosen, dtype, sizes
from mla_fx.cli_report import lines, measured
from mla_fx.effects import InputError, Orchestration
from mla_fx.models import Checkpoint, Runner
from mla_fx.models.addition import DIRECTORY, problems
from mla_fx.models.plan import Plan
from mla_fx.models.runner import Piece
from mla_fx.models.tokenizer import Tokenizer

#: Prompt tokens that go through the layers at a time, of all requests together.
CHUNK = 64


@define
class Lane:
    """A model on a backend, and the time that its steps took."""

    runner: Runner
    seconds: float = field(default=0.0)

    def forward(self, pieces: Sequence[Piece], rows: Sequence[int], *, filling: bool) -> torch.Tensor:
        """Logits of the tokens numbered `rows`."""
        start = time.perf_counter()
        (logits,), _ = self.runner.forward([pieces], [rows], filling=filling)
        assert logits is not None  # all ranks run here
        self.seconds += time.perf_counter() - start
        return logits


@define
class Request:
    """A prompt, what was decoded behind it, and its blocks."""

    tokens: list[int]
    table: list[int]
    new: list[int] = field(factory=list)

    def until(self, end: Sequence[int]) -> list[int]:
        """What was decoded, up to the first token of `end`."""
        return list(itertools.takewhile(lambda token: token not in end, self.new))


@define
class Comparison:
    """Logits beside those of the reference: deviations, relative to the reference's root mean square, and choices."""

    largest: float = 0.0
    squares: float = 0.0
    numbers: int = 0
    same: int = 0
    rows: int = 0

    def add(self, found: torch.Tensor, right: torch.Tensor) -> None:
        """Take the logits [rows, vocabulary] of one step into account."""
        found = found.cpu()
        difference = (found.double() - right).abs() / right.square().mean().sqrt()
        self.largest = max(self.largest, float(difference.max()))
        self.squares += float(difference.square().sum())
        self.numbers += difference.numel()
        self.same += int((found.argmax(1) == right.argmax(1)).sum())
        self.rows += len(right)

    def __str__(self) -> str:
        typical = math.sqrt(self.squares / self.numbers)
        return (
            f"deviation from reference: {typical:.3g} typical, {self.largest:.3g} largest, of the logits' root mean "
            f"square; {self.same} of {self.rows} most likely tokens are the same"
        )


def decode(options: argparse.Namespace, orchestration: Orchestration) -> int:
    """Run the command with parsed options; returns the exit status."""
    if options.prompt is not None and options.prompt < 1:
        raise InputError(f"--prompt: must be at least 1: got {options.prompt}")
    checkpoint = Checkpoint.open(options.model or DIRECTORY)
    config = checkpoint.config
    generator = torch.Generator().manual_seed(options.seed)
    prompts = _prompts(options, config.vocab_size, generator)
    longest = max(map(len, prompts)) + options.steps + options.new_tokens
    if config.max_position_embeddings is not None and longest > config.max_position_embeddings:
        raise InputError(
            f"--steps: prompt and steps must fit max_position_embeddings, {config.max_position_embeddings}: "
            f"got {longest}"
        )
    made = [chosen(options)]
    if options.report:
        made = [Metered.of(made[0])]
    shape = _shape(options, len(prompts), longest, dtype(options, config, made[0]))
    name = options.model or "built-in model, trained to add"
    heads = f"{config.attention.num_attention_heads} heads, latent {config.attention.kv_lora_rank}"
    print(f"{name}: {config.num_hidden_layers} layers, {heads}")
    print(f"{options.backend}, {options.ranks} ranks, {shape.dtype}, {orchestration.name} ({options.mode})")

    if not options.no_reference:
        made.append(backends.get("reference", ranks=options.ranks))
    lanes = [
        Lane(
            Runner.load(
                checkpoint,
                backend,
                shape=shape,
                interleave=options.interleave,
                orchestration=orchestration,
                prefill_orchestration=orchestration,
                mode=options.mode,
                progress=True,
            )
        )
        for backend in made
    ]
    width = shape.table_width
    requests = [Request(list(prompt), list(range(b * width, (b + 1) * width))) for b, prompt in enumerate(prompts)]
    end = () if _drawn(options) else config.eos_token_id
    comparison = Comparison()
    _run(lanes, requests, comparison, generator, options, end)
    if not _drawn(options):
        for request, (prompt, _) in zip(requests, problems(len(requests), seed=options.seed), strict=True):
            print(f"{prompt} {Tokenizer(DIRECTORY).decode(request.until(end))}")
    tokens = sum(len(request.new) for request in requests)
    print(f"{tokens} tokens in {lanes[0].seconds:.2f} s: {tokens / lanes[0].seconds:.1f} tokens per second")
    if len(lanes) == 2:
        print(comparison)
    if isinstance(made[0], Metered):
        kind = evolve(shape, dtype=made[0].dtype or shape.dtype)
        plan = Plan(config=config, shape=kind, context=longest)
        print("\n".join(lines(measured(lanes[0].runner, made[0]), plan)))
    return 0


def _shape(options: argparse.Namespace, requests: int, longest: int, dtype: str) -> StepShape:
    """Sizes in which every request has blocks for `longest` positions."""
    width = -(-longest // (options.block_size * options.ranks))
    return StepShape(
        requests=requests,
        blocks=requests * width,
        table_width=width,
        dtype=dtype,
        **sizes(options),
    )


def _drawn(options: argparse.Namespace) -> bool:
    """Whether prompts are random tokens: of other models, or where a length is given."""
    return bool(options.model) or options.prompt is not None


def _prompts(options: argparse.Namespace, vocabulary: int, generator: torch.Generator) -> list[list[int]]:
    """Tokens at random; or, of the built-in model and without a length, problems it can solve."""
    if _drawn(options):
        count = 40 if options.prompt is None else options.prompt
        drawn: list[list[int]] = torch.randint(vocabulary, (options.requests, count), generator=generator).tolist()
        return drawn
    tokenizer = Tokenizer(DIRECTORY)
    return [tokenizer.encode(prompt) for prompt, _ in problems(options.requests, seed=options.seed)]


def _run(
    lanes: list[Lane],
    requests: list[Request],
    comparison: "Comparison",
    generator: torch.Generator,
    options: argparse.Namespace,
    end: Sequence[int],
) -> None:
    """Prompts and greedy steps on every lane, until the steps are over or every text has ended."""
    vocabulary, extra = lanes[0].runner.config.vocab_size, options.new_tokens - 1

    def forward(pieces: list[Piece], *, filling: bool) -> torch.Tensor:
        rows = range(sum(len(piece.tokens) for piece in pieces))
        found = [lane.forward(pieces, rows, filling=filling) for lane in lanes]
        if len(found) == 2:
            comparison.add(*found)
        return found[0]

    with tqdm(total=options.steps + 1, unit="step", desc="prompt", leave=False, disable=None) as bar:
        following = [_fill(forward, request) for request in requests]
        bar.update()
        bar.set_description("decode")
        for lane in lanes:
            lane.seconds = 0.0
        for _ in range(options.steps):
            # Behind the token that is known, drafts at random, as speculative decoding sends them: none is accepted.
            drafts = torch.randint(vocabulary, (len(requests), extra), generator=generator).tolist()
            pieces = [
                Piece(tokens=[token, *more], start=len(request.tokens), table=request.table)
                for request, token, more in zip(requests, following, drafts, strict=True)
            ]
            logits = forward(pieces, filling=False)
            for request, token in zip(requests, following, strict=True):
                request.tokens.append(token)
                request.new.append(token)
            following = logits[:: options.new_tokens].argmax(1).tolist()
            bar.update()
            if end and all(set(request.new) & set(end) for request in requests):
                return


def _fill(forward: Callable[..., torch.Tensor], request: Request) -> int:
    """Bring a prompt into the cache, chunk after chunk; the token behind it."""
    for start in range(0, len(request.tokens), CHUNK):
        tokens = request.tokens[start : start + CHUNK]
        logits = forward([Piece(tokens=tokens, start=start, table=request.table)], filling=True)
    return int(logits[-1].argmax())
