"""`mla-fx decode`: prompts, then decode steps, on one backend and beside it on the reference."""

import argparse
import functools
import itertools
import math
import time
from collections.abc import Sequence

import torch
from attrs import define, evolve, field
from tqdm import tqdm

from mla_fx import StepShape
from mla_fx.backends.meter import Metered
from mla_fx.cli_backend import chosen, dtype, sizes
from mla_fx.cli_report import lines, measured
from mla_fx.effects import InputError, Orchestration
from mla_fx.layout import Layout, layout_of
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

    def forward(self, pieces: Sequence[Sequence[Piece]], *, filling: bool) -> list[torch.Tensor | None]:
        """Logits of all tokens, of each replica whose first rank is here."""
        start = time.perf_counter()
        rows = [range(sum(len(piece.tokens) for piece in mine)) for mine in pieces]
        logits, _ = self.runner.forward(pieces, rows, filling=filling)
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

    def __add__(self, other: "Comparison") -> "Comparison":
        """Of both together."""
        counted = (getattr(self, name) + getattr(other, name) for name in ("squares", "numbers", "same", "rows"))
        return Comparison(max(self.largest, other.largest), *counted)

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
    shape = _shape(options, longest, dtype(options, config, made[0]))
    name = options.model or "built-in model, trained to add"
    heads = f"{config.attention.num_attention_heads} heads, latent {config.attention.kv_lora_rank}"
    print(f"{name}: {config.num_hidden_layers} layers, {heads}")
    print(f"{options.backend}, {_ranks(options.layout)}, {shape.dtype}, {orchestration.name} ({options.mode})")

    if not options.no_reference:
        made.append(chosen(options, "reference"))
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
                expand=not options.no_expand,
                capture=options.capture if backend is made[0] else (),
                contexts=options.capture_contexts,
                progress=True,
            )
        )
        for backend in made
    ]
    for lane in lanes:
        lane.runner.ready(chunk=CHUNK)
    width, count = shape.table_width, shape.requests
    requests = [
        Request(list(prompt), list(range(b % count * width, (b % count + 1) * width)))
        for b, prompt in enumerate(prompts)
    ]
    end = () if _drawn(options) else config.eos_token_id
    comparison = _run(lanes, [requests[b : b + count] for b in range(0, len(requests), count)], generator, options, end)
    if not _drawn(options):
        for request, (prompt, _) in zip(requests, problems(len(requests), seed=options.seed), strict=True):
            print(f"{prompt} {Tokenizer(DIRECTORY).decode(request.until(end))}")
    tokens = sum(len(request.new) for request in requests)
    print(f"{tokens} tokens in {lanes[0].seconds:.2f} s: {tokens / lanes[0].seconds:.1f} tokens per second")
    if comparison is not None:
        print(comparison)
    if isinstance(made[0], Metered):
        kind = evolve(shape, dtype=made[0].dtype or shape.dtype)
        plan = Plan(config=config, shape=kind, context=longest)
        print("\n".join(lines(measured(lanes[0].runner, made[0]), plan)))
    return 0


def _ranks(layout: Layout) -> str:
    return f"{layout.size} ranks" + ("" if layout == layout_of(layout.size) else f" ({layout})")


def _shape(options: argparse.Namespace, longest: int, dtype: str) -> StepShape:
    """Sizes in which every request of a replica has blocks for `longest` positions."""
    width = -(-longest // (options.block_size * options.layout.dcp))
    return StepShape(
        requests=options.requests,
        blocks=options.requests * width,
        table_width=width,
        dtype=dtype,
        **sizes(options),
    )


def _drawn(options: argparse.Namespace) -> bool:
    """Whether prompts are random tokens: of other models, or where a length is given."""
    return bool(options.model) or options.prompt is not None


def _prompts(options: argparse.Namespace, vocabulary: int, generator: torch.Generator) -> list[list[int]]:
    """Tokens at random; or, of the built-in model and without a length, problems it can solve."""
    requests = options.requests * options.layout.dp
    if _drawn(options):
        count = 40 if options.prompt is None else options.prompt
        drawn: list[list[int]] = torch.randint(vocabulary, (requests, count), generator=generator).tolist()
        return drawn
    tokenizer = Tokenizer(DIRECTORY)
    return [tokenizer.encode(prompt) for prompt, _ in problems(requests, seed=options.seed)]


@define
class _Steps:
    """Steps of all lanes, each replica with the requests that are its own."""

    lanes: list[Lane]
    comparisons: list[Comparison] = field(init=False)  # of each replica; those count that are made with its first rank

    def __attrs_post_init__(self) -> None:
        self.comparisons = [Comparison() for _ in range(self.lanes[0].runner.replicas)]

    def forward(self, pieces: list[list[Piece]], *, filling: bool) -> list[list[int]]:
        """The likeliest token behind each token of each replica."""
        found, *right = [lane.forward(pieces, filling=filling) for lane in self.lanes]
        for beside in right:
            for comparison, ours, exactly in zip(self.comparisons, found, beside, strict=True):
                if ours is not None and exactly is not None and len(ours):
                    comparison.add(ours, exactly)
        best = [None if logits is None else logits.argmax(1).tolist() for logits in found]
        return self.lanes[0].runner.decided(best)

    def fill(self, row: Sequence[Request]) -> list[int]:
        """Bring a prompt of each replica into its cache, chunk after chunk; the tokens behind them."""
        following = [0] * len(row)
        for start in range(0, max(len(request.tokens) for request in row), CHUNK):
            cuts = [request.tokens[start : start + CHUNK] for request in row]
            pieces = [
                [Piece(tokens=cut, start=start, table=request.table)] if cut else []
                for request, cut in zip(row, cuts, strict=True)
            ]
            best = self.forward(pieces, filling=True)
            following = [mine[-1] if mine else before for mine, before in zip(best, following, strict=True)]
        return following

    def compared(self) -> Comparison | None:
        """Of all replicas together; None where nothing runs beside."""
        every: list[Comparison] = self.lanes[0].runner.decided(self.comparisons)
        return functools.reduce(Comparison.__add__, every) if len(self.lanes) == 2 else None


def _run(
    lanes: list[Lane],
    replicas: list[list[Request]],
    generator: torch.Generator,
    options: argparse.Namespace,
    end: Sequence[int],
) -> Comparison | None:
    """Prompts and greedy steps on every lane, until the steps are over or every text has ended."""
    vocabulary, extra = lanes[0].runner.config.vocab_size, options.new_tokens - 1
    steps, requests = _Steps(lanes), [request for mine in replicas for request in mine]
    with tqdm(total=options.steps + 1, unit="step", desc="prompt", leave=False, disable=None) as bar:
        rows = [steps.fill(row) for row in zip(*replicas, strict=True)]
        following = [list(mine) for mine in zip(*rows, strict=True)]
        bar.update()
        bar.set_description("decode")
        for lane in lanes:
            lane.seconds = 0.0
        for _ in range(options.steps):
            # Behind the token that is known, drafts at random, as speculative decoding sends them: none is accepted.
            drafts = iter(torch.randint(vocabulary, (len(requests), extra), generator=generator).tolist())
            pieces = [
                [
                    Piece(tokens=[token, *next(drafts)], start=len(request.tokens), table=request.table)
                    for request, token in zip(mine, tokens, strict=True)
                ]
                for mine, tokens in zip(replicas, following, strict=True)
            ]
            best = steps.forward(pieces, filling=False)
            for request, token in zip(requests, itertools.chain(*following), strict=True):
                request.tokens.append(token)
                request.new.append(token)
            following = [mine[:: options.new_tokens] for mine in best]
            bar.update()
            if end and all(set(request.new) & set(end) for request in requests):
                break
    return steps.compared()
