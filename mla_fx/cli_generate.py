"""`mla-fx generate`: prompts to text, streamed as it comes."""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from mla_fx import Sharding, StepShape
from mla_fx.cli_backend import chosen, dtype
from mla_fx.effects import InputError, Orchestration
from mla_fx.models import Checkpoint, Engine, MtpDrafter, Request, Runner
from mla_fx.models.addition import DIRECTORY, problems
from mla_fx.models.tokenizer import TextStream, Tokenizer


def generate(options: argparse.Namespace, orchestration: Orchestration) -> int:
    """Run the command with parsed options; returns the exit status."""
    if options.model and not options.prompt:
        raise InputError("--prompt: must be given with --model: got none")
    prompts = options.prompt or [prompt for prompt, _ in problems(3, seed=options.seed)]
    checkpoint, tokenizer = Checkpoint.open(options.model or DIRECTORY), Tokenizer(options.model or DIRECTORY)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    engine = _engine(options, orchestration, checkpoint, max(map(len, encoded)) + options.max_new_tokens)
    requests = [
        engine.add(tokens, max_new_tokens=options.max_new_tokens, seed=options.seed + number)
        for number, tokens in enumerate(encoded)
    ]
    start = time.perf_counter()
    try:
        _stream(engine, tokenizer, prompts, requests)
    finally:
        _report(requests, time.perf_counter() - start)
    return 0


def _engine(options: argparse.Namespace, orchestration: Orchestration, checkpoint: Checkpoint, longest: int) -> Engine:
    """The model on its backend, with blocks for the longest requests unless their number is given."""
    backend = chosen(options)
    sharding = Sharding(ranks=options.ranks, interleave=options.interleave, block_size=options.block_size)
    width = sharding.blocks(longest + options.drafts)
    shape = StepShape(
        ranks=options.ranks,
        requests=options.requests,
        blocks=options.blocks or options.requests * width,
        block_size=options.block_size,
        table_width=width,
        dtype=dtype(options, checkpoint.config, backend),
        replicate_query=options.replicate_query,
        quantization=options.quantization,
    )
    runner = Runner.load(
        checkpoint,
        backend,
        shape=shape,
        mtp=options.drafts > 0,
        interleave=options.interleave,
        orchestration=orchestration,
        mode=options.mode,
        progress=True,
    )
    return Engine(
        runner=runner,
        chunk=options.chunk,
        temperature=options.temperature,
        drafter=MtpDrafter(runner, options.drafts) if options.drafts else None,
        end=() if options.ignore_end else checkpoint.config.eos_token_id,
    )


def _stream(engine: Engine, tokenizer: Tokenizer, prompts: Sequence[str], requests: Sequence[Request]) -> None:
    """Print prompt after prompt with its text; the first one that is not finished as its text comes."""
    streams = {request.number: TextStream(tokenizer) for request in requests}
    texts = dict.fromkeys(streams, "")
    finished: set[int] = set()
    front = 0
    print(f"> {prompts[0]}", flush=True)
    for output in engine.run():
        number = output.request.number
        texts[number] += streams[number].add(output.tokens, finished=output.finished)
        if output.finished:
            finished.add(number)
        while front < len(requests):
            print(texts[front], end="", flush=True)
            texts[front] = ""
            if front not in finished:
                break
            print(flush=True)
            front += 1
            if front < len(requests):
                print(f"> {prompts[front]}", flush=True)


def _report(requests: Sequence[Request], seconds: float) -> None:
    """What it took, on the error stream, so that text alone can be piped on."""
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
    print(line, file=sys.stderr)
