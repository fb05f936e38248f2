"""Prompts to their first tokens: our engine against transformers' `generate`, on one checkpoint; how the cost grows.

A row states the multiply-adds of its prompt by the formula, and the part of the machine's limit that they make of the
time that was measured: where it stays the same from row to row, the cost grows as counted.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.utils import logging

from mla_fx import StepShape, backends
from mla_fx.backends.cpu import products
from mla_fx.dtypes import DTYPES
from mla_fx.effects.cost import multiply_adds
from mla_fx.models import Checkpoint, Engine, ModelConfig, Runner
from mla_fx.models.addition import DIRECTORY
from mla_fx.models.chunks import round_up, taken
from mla_fx.models.stack import model_step
from mla_fx.passes import expanding_saves
from tests.benchmarks.table import TRANSFORMERS, Point, agree, pinned
from tests.benchmarks.test_layer import MEDIUM as SIZES
from tests.benchmarks.test_model import MEDIUM

BLOCK = 64
#: One layer, of experts: what a prompt costs grows with the layers as it is.
LAYER = MEDIUM | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
#: Tokens of a prompt, of the short grid and of the whole one.
LENGTHS, WHOLE = (500, 2000), (500, 1000, 2000, 4000, 8000, 16000)
#: Tokens from which on there are 4 heads: transformers keeps all scores of a prompt, at its peak 2.6 times in float32,
#: which for 16,000 tokens is 10.6 GB beside what 4 heads need else (seen), and would be 42 GB for 16.
LONG = 16000
#: How many times as long as in a prompt of 500 tokens a multiply-add may take in a long one: those of attention come
#: with a softmax, and 1.34 was seen at 8,000 tokens.
GROWTH = 1.5


def ours(directory: Path, dtype: str, prompts: list[list[int]]) -> Engine:
    """An engine for these prompts, which shares no blocks with what it was asked before."""
    requests, width = len(prompts), len(prompts[0]) // BLOCK + 1
    shape = StepShape(requests=requests, blocks=requests * width, block_size=BLOCK, table_width=width, dtype=dtype)
    runner = Runner.load(Checkpoint.open(directory), backends.get("cpu"), shape=shape)
    return Engine(runner=runner, prefix_cache=False)


def first(engine: Engine, dtype: str, prompts: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """The first token of each prompt, from nothing."""
    asked = [engine.add(prompt, max_new_tokens=1, top_logprobs=0) for prompt in prompts]
    for _ in engine.run():
        pass
    tokens, logs = zip(*((request.new_tokens[0], request.logprobs[0].chosen) for request in asked), strict=True)
    return said(torch.tensor(tokens), torch.tensor(logs), engine.runner.config.vocab_size, dtype)


def theirs(directory: Path, dtype: str, prompts: list[list[int]]) -> Callable[[], tuple[torch.Tensor, ...]]:
    """transformers' `generate` of one token, of all prompts in one batch; its own cache and SDPA."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = DeepseekV3ForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype]).eval()
    ids = torch.tensor(prompts)
    options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}

    def generate() -> tuple[torch.Tensor, ...]:
        (logits,) = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options).logits
        logprobs, tokens = logits.float().log_softmax(1).max(1)
        return said(tokens, logprobs, logits.shape[1], dtype)

    return torch.inference_mode()(generate)


def said(tokens: torch.Tensor, logprobs: torch.Tensor, vocabulary: int, dtype: str) -> tuple[torch.Tensor, ...]:
    """What both must agree on: logprobs of the first tokens; and the tokens in float32, where rounding decides none."""
    return (logprobs, functional.one_hot(tokens, vocabulary)) if dtype == "fp32" else (logprobs,)


def counted(config: ModelConfig, length: int, chunk: int) -> int:
    """Multiply-adds of a prompt in steps of at most `chunk` tokens, alone on a rank.

    Of a step of n tokens behind m, for each token the projections and its experts, for each head, with
    p = n (n + 1) / 2 pairs within the step, either of

        absorbed    n L (P + V) + p (2 L + R)     + n m (2 L + R)
        expanded    n L (P + V) + p (P + R + V)   + the lesser of n m (2 L + R) + n L (P + V)
                                                                and n m (P + R + V) + m L (P + V)

    which is n^2 in the length at 320 a pair for DeepSeek-V3 instead of 1088, behind what is linear in it.
    """
    a, f = config.attention, config.moe
    latent, nope, rope, value = a.kv_lora_rank, a.qk_nope_head_dim, a.qk_rope_head_dim, a.v_head_dim
    heads, hidden = a.num_attention_heads, a.hidden_size
    each = hidden * (a.q_lora_rank + latent + rope) + a.q_lora_rank * heads * (nope + rope) + heads * value * hidden
    of_experts = 3 * hidden * f.moe_intermediate_size * (f.num_experts_per_tok + f.n_shared_experts)
    each += of_experts + hidden * f.n_routed_experts
    total = 0
    for m, n in steps(length, chunk):
        room, pairs, up = round_up(n), n * (n + 1) // 2, latent * (nope + value)
        # A step has room for a power of two, and logits of one row at the least.
        total += room * (each + heads * up) + hidden * config.vocab_size
        if expanding_saves(a, [n], plain=True, behind=[m]) > 0:
            ways = n * m * (2 * latent + rope) + n * up, n * m * (nope + rope + value) + m * up
            total += heads * (pairs * (nope + rope + value) + (min(ways) if m else 0))
        else:
            total += heads * (pairs + n * m) * (2 * latent + rope)
    return total


def steps(length: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Tokens that are there, and new ones, of each step of a prompt."""
    start = 0
    while start < length:
        new = taken(min(chunk, length - start))
        yield start, new
        start += new


def checkpoint(directory: Path, heads: int = LAYER["num_attention_heads"]) -> Path:
    """Of `LAYER`, with random weights."""
    torch.manual_seed(0)
    config = LAYER | {"num_attention_heads": heads, "num_key_value_heads": heads}
    DeepseekV3ForCausalLM(DeepseekV3Config(**config)).save_pretrained(directory)
    return directory


def prompt(directory: Path, dtype: str, requests: int, length: int) -> tuple[Engine, list[list[int]], int]:
    """So many prompts, with an engine for them and their multiply-adds; the seed makes all see the same."""
    config = Checkpoint.open(directory).config
    generator = torch.Generator().manual_seed(length)
    prompts = torch.randint(config.vocab_size, (requests, length), generator=generator).tolist()
    engine = ours(directory, dtype, prompts)
    return engine, prompts, requests * counted(config, length, engine.chunk)


def point(name: str, directory: Path, dtype: str, requests: int, length: int) -> Point:
    """All first tokens of so many prompts of one length."""
    engine, prompts, work = prompt(directory, dtype, requests, length)
    return Point(
        "prompts",
        f"{name}, {dtype}, {requests} of {length} tokens, {work / 1e9:.3g} G multiply-adds",
        partial(first, engine, dtype, prompts),
        {TRANSFORMERS: theirs(directory, dtype, prompts)},
        operations=2 * work,
        dtype=dtype,
        least={TRANSFORMERS: 1.5 if length >= LONG else 1.0},
        tolerance=0.02,
    )


def points(whole: bool = False) -> Iterator[Point]:
    own = "bf16" if products.has(torch.bfloat16) else "fp32"
    with tempfile.TemporaryDirectory() as name:
        directory, few = checkpoint(Path(name) / "16"), checkpoint(Path(name) / "4", heads=4)
        for dtype in ("fp32", "bf16") if whole else (own,):
            yield point("one layer", directory, dtype, 8, 64)
            for length in WHOLE if whole else LENGTHS:
                long = length >= LONG
                yield point("one layer, 4 heads" if long else "one layer", few if long else directory, dtype, 1, length)


def test_both_say_the_same_first_tokens():
    """Of one prompt in several steps, and of several in one."""
    agree(point("built-in", DIRECTORY, "fp32", 1, 150))
    agree(point("built-in", DIRECTORY, "fp32", 3, 20))


@pytest.mark.parametrize("length, chunk", [(500, 512), (1300, 512), (200, 64), (2048, 1024), (600, 1024)])
def test_the_formula_counts_what_the_steps_do(length: int, chunk: int):
    """Of each step of a prompt, as the CPU backend has it: absorbed, and expanded with either form of the history."""
    backend, work = backends.get("cpu"), 0
    for start, new in steps(length, chunk):
        shape = StepShape(tokens=round_up(new), requests=1, blocks=32, block_size=BLOCK, table_width=32)
        if expanding_saves(SIZES.attention, [new], plain=True, behind=[start]) > 0:
            shape = evolve(shape, project_before_merge=True, expand_current=True)
        step = backend.lower(model_step(SIZES, shape, rows=1))
        lengths = {"batch.query_lengths": (new,), "batch.history_lengths": (start,)}
        work += multiply_adds(step.inputs, step.equations, lengths)
    assert work == counted(SIZES, length, chunk)


@pytest.mark.bench
@pytest.mark.parametrize("length", [4000, LONG])
def test_the_cost_grows_as_counted(length: int, tmp_path: Path):
    """A multiply-add of a long prompt against one of 500 tokens, before it and behind."""
    checkpoint(tmp_path)
    with pinned(1), torch.no_grad():
        runs = [prompt(tmp_path, "fp32", 1, size) for size in (500, length)]
        first(runs[0][0], "fp32", runs[0][1])
        spent: list[list[float]] = [[], []]
        for number in (0, 0, 0, 1, 0, 0, 0):
            engine, prompts, work = runs[number]
            start = time.thread_time()
            first(engine, "fp32", prompts)
            spent[number].append((time.thread_time() - start) / work)
    short, long = map(statistics.median, spent)
    print(f"{length} tokens: {long * 1e12:.1f} ps for a multiply-add, 500 tokens: {short * 1e12:.1f}")
    assert long <= GROWTH * short, f"{long / short:.2f} times, {long * 1e12:.1f} ps for {short * 1e12:.1f}"
