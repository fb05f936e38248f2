"""`mla-fx generate`: prompts to text, streamed as it comes."""

import argparse
import itertools
import os
import select
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import asdict, field, frozen

from mla_fx import Sharding, StepShape
from mla_fx.cli_backend import chosen, dtype, sizes
from mla_fx.effects import InputError, Orchestration
from mla_fx.models import Checkpoint, Engine, MtpDrafter, Request, Runner, Sampling, load_generation_config
from mla_fx.models.addition import DIRECTORY, problems
from mla_fx.models.sampling import FIELDS
from mla_fx.models.tokenizer import Tokenizer

#: Tokens that a text may have where neither the user nor the checkpoint says it.
MAX_NEW_TOKENS = 32
#: How long rank 0 waits for a line before it tells the others that there is none yet, in seconds; what ends them.
_MEETING, _END = 0.5, "\n"
#: Tokens that a conversation from standard input may have where neither `--blocks` nor the model says it.
CONVERSATION = 4096


@frozen(kw_only=True)
class Asked:
    """What is asked for: the options, with what the checkpoint says where they say nothing."""

    options: argparse.Namespace
    orchestration: Orchestration
    tokenizer: Tokenizer
    sampling: Sampling
    end: tuple[int, ...]
    max_new_tokens: int
    requests: list[Request] = field(factory=list)

    @classmethod
    def of(cls, options: argparse.Namespace, orchestration: Orchestration) -> "Asked":
        """Read tokenizer and defaults; no weight is read yet."""
        directory = options.model or DIRECTORY
        tokenizer, defaults = Tokenizer(directory), load_generation_config(directory)
        given = {name: getattr(options, name) for name in FIELDS if getattr(options, name) is not None}
        return cls(
            options=options,
            orchestration=orchestration,
            tokenizer=tokenizer,
            sampling=Sampling(**asdict(defaults.sampling) | given),
            end=() if options.ignore_end else defaults.eos_token_id,
            max_new_tokens=options.max_new_tokens or defaults.max_new_tokens or MAX_NEW_TOKENS,
        )

    def engine(self, longest: int | None) -> Engine:
        """The model on its backend, with blocks for requests of `longest` positions unless `--blocks` is given.

        Without a `longest`, a request may have as many as the blocks hold, or as the model takes.
        """
        options = self.options
        checkpoint, backend = Checkpoint.open(options.model or DIRECTORY), chosen(options)
        sharding = Sharding(ranks=options.layout.dcp, interleave=options.interleave, block_size=options.block_size)
        if longest is None:
            longest = min(checkpoint.config.max_position_embeddings or CONVERSATION, CONVERSATION)
            width = options.blocks or sharding.blocks(longest + options.drafts)
        else:
            width = sharding.blocks(longest + options.drafts)
        shape = StepShape(
            requests=options.requests,
            blocks=options.blocks or options.requests * width,
            table_width=width,
            dtype=dtype(options, checkpoint.config, backend),
            **sizes(options),
        )
        runner = Runner.load(
            checkpoint,
            backend,
            shape=shape,
            mtp=options.drafts > 0,
            interleave=options.interleave,
            orchestration=self.orchestration,
            mode=options.mode,
            expand=not options.no_expand,
            capture=options.capture,
            contexts=options.capture_contexts,
            progress=True,
        )
        return Engine(
            runner=runner,
            chunk=options.chunk or runner.chunk,
            drafter=MtpDrafter(runner, options.drafts) if options.drafts else None,
            end=self.end,
            tokenizer=self.tokenizer,
            prefix_cache=not options.no_prefix_cache,
        )

    def add(self, engine: Engine, tokens: Sequence[int]) -> Request:
        """Queue a prompt; each has a seed of its own, the next after that of the one before."""
        sampling = asdict(self.sampling) | {"seed": self.sampling.seed + len(self.requests)}
        request = engine.add(
            tokens,
            max_new_tokens=self.max_new_tokens,
            sampling=Sampling(**sampling),
            stop=self.options.stop or (),
            top_logprobs=self.options.logprobs,
        )
        self.requests.append(request)
        return request

    def report(self, engine: Engine, seconds: float) -> None:
        """What there is to say besides the text, on the error stream, so that text alone can be piped on."""
        for line in _figures(self.requests, engine, seconds):
            print(line, file=sys.stderr)
        around = self.tokenizer.around
        marks = [self.tokenizer.name(token) for token in (*around.front, *around.behind)]
        if not self.options.chat:
            print(f"around each prompt, by {around.file}: {' '.join(marks) or 'nothing'}", file=sys.stderr)
        for request in self.requests:
            _print_logprobs(self.tokenizer, request)
            if request.error:
                print(f"mla-fx generate: prompt {request.number + 1}: {request.error}", file=sys.stderr)


def generate(options: argparse.Namespace, orchestration: Orchestration) -> int:
    """Run the command with parsed options; returns the exit status (1: a text ended in an error)."""
    if options.system is not None and not options.chat:
        raise InputError(f"--system: is for --chat: got {options.system!r}")
    if options.model and not options.prompt and not options.chat:
        raise InputError("--prompt: must be given with --model: got none")
    asked = Asked.of(options, orchestration)
    engine, steps = (_chat if options.chat else _prompts)(asked)
    start = time.perf_counter()
    try:
        for text in steps:
            print(text, end="", flush=True)
    finally:
        asked.report(engine, time.perf_counter() - start)
    return 1 if any(request.error for request in asked.requests) else 0


def _prompts(asked: Asked) -> tuple[Engine, Iterator[str]]:
    """Prompts that are served together."""
    prompts = asked.options.prompt or [prompt for prompt, _ in problems(3, seed=asked.options.seed)]
    encoded = [asked.tokenizer.encode(prompt) for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if not tokens:
            raise InputError(f"--prompt: must have at least one token: got {prompt!r}, and nothing is put around it")
    engine = asked.engine(max(map(len, encoded)) + asked.max_new_tokens)
    for tokens in encoded:
        asked.add(engine, tokens)
    return engine, _stream(engine, prompts, asked.requests)


def _stream(engine: Engine, prompts: Sequence[str], requests: Sequence[Request]) -> Iterator[str]:
    """Prompt after prompt with its text; of the first one that is not finished as its text comes."""
    texts = {request.number: "" for request in requests}
    front = 0
    yield f"> {prompts[0]}\n"
    told: set[int] = set()  # whose last text has been seen: a request may be finished before its output comes by
    for output in engine.run():
        texts[output.request.number] += output.text
        if output.finished:
            told.add(output.request.number)
        while front < len(requests):
            yield texts[requests[front].number]
            texts[requests[front].number] = ""
            if requests[front].number not in told:
                break
            front += 1
            yield f"\n> {prompts[front]}\n" if front < len(requests) else "\n"


def _chat(asked: Asked) -> tuple[Engine, Iterator[str]]:
    """One conversation: prompts, or else lines of standard input, are the user's turns."""
    options, prompts = asked.options, asked.options.prompt
    start = [{"role": "system", "content": options.system}] if options.system is not None else []
    turns: list[dict[str, str]] = []
    for prompt in prompts or ["?"]:  # one that cannot be rendered is refused before weights are read
        turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": ""}]
    whole = len(asked.tokenizer.chat([*start, *turns]))
    # An answer may have more tokens when its text is encoded again as a part of the next prompt.
    longest = whole + 2 * asked.max_new_tokens * len(prompts) if prompts else None
    engine = asked.engine(longest)
    return engine, _turns(asked, engine, start, prompts or _lines(engine))


def _lines(engine: Engine) -> Iterator[str]:
    """Lines of standard input; in a group rank 0 reads them for all, and while none comes it tells the others so."""
    backend = engine.runner.backend
    if len(backend.here) == backend.layout.size:
        yield from map(str.rstrip, sys.stdin)
        return
    typed = _typed() if backend.here.start == 0 else itertools.repeat(None)
    while (line := backend.share(next(typed, _END))[0]) != _END:
        if line is not None:
            yield line.rstrip()


def _typed() -> Iterator[str | None]:
    """Lines of standard input as they come, and None while none does."""
    kept = b""
    while True:
        if not select.select([0], [], [], _MEETING)[0]:
            yield None
            continue
        got = os.read(0, 1 << 16)
        *lines, kept = (kept + (got or b"\n" * bool(kept))).split(b"\n")
        yield from (line.decode() for line in lines)
        if not got:
            return


def _turns(asked: Asked, engine: Engine, messages: list[dict[str, str]], prompts: Any) -> Iterator[str]:
    """Turn after turn, each with all that was said before."""
    for prompt in prompts:
        yield f"> {prompt}\n"
        messages.append({"role": "user", "content": prompt})
        request = asked.add(engine, asked.tokenizer.chat(messages))
        for output in engine.run():
            yield output.text
        yield "\n"
        messages.append({"role": "assistant", "content": request.text})


def _figures(requests: Sequence[Request], engine: Engine, seconds: float) -> Iterator[str]:
    tokens = sum(len(request.new_tokens) for request in requests)
    line = f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens per second"
    waits = [request.first_token - request.arrived for request in requests if request.first_token is not None]
    if waits:
        line += f", time to first token {statistics.median(waits):.3f} s"
        if len(waits) > 1:
            line += f" (median of {len(waits)})"
    if drafted := sum(request.drafted for request in requests):
        accepted = sum(request.accepted for request in requests)
        line += f", {accepted} of {drafted} drafts accepted ({accepted / drafted:.0%})"
    yield line
    found, asked = (sum(getattr(replica.blocks, name) for replica in engine.replicas) for name in ("found", "asked"))
    if asked:
        yield f"prefix cache: {found} of {asked} tokens of prompts found ({found / asked:.0%})"


def _print_logprobs(tokenizer: Tokenizer, request: Request) -> None:
    """A line a token: its logprob and those of the likeliest."""
    for token, logs in zip(request.new_tokens, request.logprobs, strict=False):
        best = ", ".join(f"{tokenizer.name(other)!r} {value:.3f}" for other, value in logs.top)
        line = f"prompt {request.number + 1}: {tokenizer.name(token)!r} {logs.chosen:.3f}"
        print(f"{line} (likeliest: {best})" if best else line, file=sys.stderr)
