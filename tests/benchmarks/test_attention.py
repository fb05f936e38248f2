"""Decode attention on the CPU against what a user would write in torch, in turn in one run, as ratios.

The torch pair is `mm`, `softmax`, `mm` into buffers that are kept, over keys
gathered beforehand, latent beside rope: it reads no paged cache and gives no
LSE.  Time is that of this thread on the processor, so others may use the machine
too; all is run on one thread, but where threads are compared.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attrs import define, field
from torch.nn.functional import scaled_dot_product_attention

from mla_fx.backends import cpu
from mla_fx.backends.cpu import kernel, products
from mla_fx.backends.device import Run
from mla_fx.dtypes import DTYPES
from mla_fx.effects import ops
from tests.benchmarks import apart
from tests.benchmarks.table import PAIR, SDPA, Point

LATENT, ROPE, BLOCK, SCALE = 512, 64, 128, 192**-0.5
MIXED = (100, 4000, 1700, 700)
#: Heads, and lengths of the requests: at most 128k keys in all, which are 300 MB in float32.
POINTS = [
    (heads, (keys,) * requests)
    for heads in (128, 16, 8, 1)
    for requests in (1, 4, 16, 64)
    for keys in (1024, 8192, 32768)
    if requests * keys <= 1 << 17
] + [(heads, MIXED) for heads in (128, 16, 8, 1)]
#: Of them, without `--whole`.
FEW = [
    *((heads, lengths) for heads in (128, 16) for lengths in ((1024,), (1024,) * 4, (8192,), MIXED)),
    *((16, (1024,) * 64), (8, (1024,)), (8, MIXED), (1, (1024,)), (1, MIXED)),
]
#: How many times as long as an engine the torch pair must take in bf16: at every point, and in the median of those with
#: so many heads and fewer.
FASTER = {"amx": (1.8, 3.0, 128), "avx512_bf16": (1.0, 1.3, 16), "fma": (1.0, 1.0, 128)}


@define(eq=False)
class Case:
    """Requests of so many cached keys and new tokens each, in blocks that follow each other or lie anywhere."""

    heads: int
    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    tokens: int = 1
    scattered: bool = False
    operands: tuple[Any, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        need = [-(-keys // BLOCK) for keys in self.lengths]
        order = (torch.randperm(sum(need), generator=draw) if self.scattered else torch.arange(sum(need))).int()
        table = torch.zeros(len(need), max(need), dtype=torch.int32)
        for row, blocks in zip(table, order.split(need), strict=True):
            row[: len(blocks)] = blocks
        rows = (len(need) * self.tokens, self.heads)
        shapes = ((*rows, LATENT), (*rows, ROPE), (sum(need), BLOCK, LATENT), (sum(need), BLOCK, ROPE))
        tensors = (torch.randn(shape, generator=draw).mul_(0.5).to(self.dtype) for shape in shapes)
        self.operands = (*tensors, table, (self.tokens,) * len(need), self.lengths)

    def ours(self) -> Callable[[], Any]:
        """The rule of the CPU backend."""
        rule, run = cpu.TABLE.rules[ops.HistoryAttention], Run(0)
        return lambda: rule(*self.operands, run=run, scale=SCALE, workspace=ops.WORKSPACE)

    def pair(self, dtype: torch.dtype | None = None) -> Callable[[], Any]:
        """The torch pair, in this dtype."""
        dtype = dtype or self.dtype
        q_latent, q_rope, latent, rope, table, _, _ = self.operands
        blocks = [row[: -(-n // BLOCK)].long() for row, n in zip(table, self.lengths, strict=True)]
        keys = [
            torch.cat((latent[b].flatten(0, 1)[:n], rope[b].flatten(0, 1)[:n]), 1).to(dtype)
            for b, n in zip(blocks, self.lengths, strict=True)
        ]
        q = (torch.cat((q_latent, q_rope), 2) * SCALE).to(dtype).view(len(keys), -1, LATENT + ROPE)
        scores, weights = (torch.empty(q.shape[1] * max(self.lengths), dtype=dtype) for _ in range(2))
        out = torch.empty(*q.shape[:2], LATENT, dtype=dtype)

        def call() -> torch.Tensor:
            for b, own in enumerate(keys):
                s, p = (t[: q.shape[1] * len(own)].view(-1, len(own)) for t in (scores, weights))
                torch.mm(q[b], own.t(), out=s)
                torch.softmax(s, -1, out=p)
                torch.mm(p, own[:, :LATENT], out=out[b])
            return out

        return call

    def sdpa(self) -> Callable[[], torch.Tensor]:
        """torch's own attention, request by request, with heads as rows; values are the keys, whose latents count."""
        q_latent, q_rope, latent, rope, table, _, _ = self.operands
        q = torch.cat((q_latent, q_rope), 2).view(len(self.lengths), 1, 1, -1, LATENT + ROPE)
        caches = torch.cat((latent, rope), 2)
        keys = [
            caches[row[: -(-n // BLOCK)].long()].flatten(0, 1)[None, None, :n]
            for row, n in zip(table, self.lengths, strict=True)
        ]
        rows = (-1, self.heads, LATENT + ROPE)

        def call() -> torch.Tensor:
            parts = [scaled_dot_product_attention(x, k, k, scale=SCALE) for x, k in zip(q, keys, strict=True)]
            return torch.cat(parts, 2).view(rows)[..., :LATENT]

        return call


def seconds(*functions: Callable[[], Any], turns: int = 7, least: float = 0.01) -> list[float]:
    """Of a call of each on this thread, the median of turns that are at least so long."""
    counts, spent = [], [[] for _ in functions]
    for function in functions:
        function()
        start = time.thread_time()
        function()
        counts.append(max(1, int(least / max(time.thread_time() - start, 1e-9))))
    for _ in range(turns):
        for function, count, times in zip(functions, counts, spent, strict=True):
            start = time.thread_time()
            for _ in range(count):
                function()
            times.append((time.thread_time() - start) / count)
    return [statistics.median(times) for times in spent]


def named(lengths: tuple[int, ...]) -> str:
    alike = len(set(lengths)) == 1
    return f"{len(lengths)} requests of " + (f"{lengths[0] >> 10}k" if alike else f"{min(lengths)} to {max(lengths)}")


def points(whole: bool = False) -> Iterator[Point]:
    """Rows of `make bench`: all of `POINTS` in both dtypes with `whole`, else a few, beside what there is for them."""
    for name in ("bf16", "fp32"):
        for heads, lengths in POINTS if whole else FEW:
            case = Case(heads, lengths, DTYPES[name])
            ours, pair, sdpa = case.ours(), case.pair(), case.sdpa()
            rows = (len(lengths), heads, LATENT)
            peers = {PAIR: lambda pair=pair, rows=rows: pair().view(rows), SDPA: sdpa}
            for peer in apart.installed():
                peers[peer] = apart.attention(peer, heads, lengths, name)
            yield Point(
                "attention",
                f"{name}, {heads} heads, {named(lengths)}",
                lambda ours=ours: ours()[0],
                peers,
                bytes=sum(lengths) * (LATENT + ROPE) * DTYPES[name].itemsize,
                operations=2 * heads * sum(lengths) * (2 * LATENT + ROPE),
                dtype=name,
                least=dict.fromkeys(peers, 1.0),
            )


pytestmark = pytest.mark.bench


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(kernel.engine() is None, reason="no kernel here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_decode_attention_against_the_torch_pair(dtype: torch.dtype) -> None:
    """The pair in bf16 too, where the processor multiplies it; else in float32, which is many times as fast there."""
    theirs = dtype if products.has(dtype) else torch.float32
    at_least, in_the_median, most = FASTER["fma" if dtype == torch.float32 else kernel.engine() or ""]
    ratios: dict[tuple[int, tuple[int, ...]], float] = {}
    for heads, lengths in POINTS:
        case = Case(heads, lengths, dtype)
        ours, pair = seconds(case.ours(), case.pair(theirs))
        ratios[heads, lengths] = pair / ours
        print(f"{heads} heads, {named(lengths)}: {pair / ours:.2f}", flush=True)
    print("at least", min(ratios.values()), "median", statistics.median(ratios.values()))
    assert min(ratios.values()) >= at_least, min(ratios.items(), key=lambda item: item[1])
    assert statistics.median(ratio for (heads, _), ratio in ratios.items() if heads <= most) >= in_the_median


def test_more_new_tokens_cost_less_each() -> None:
    for heads in (16, 128):
        cases = [Case(heads, (2048,), torch.bfloat16, tokens) for tokens in (1, 2, 4, 8)]
        each = [time / case.tokens for case, time in zip(cases, seconds(*(c.ours() for c in cases)), strict=True)]
        print(f"{heads} heads, a token of 1, 2, 4, 8:", *(f"{time / each[0]:.2f}" for time in each))
        assert max(each[1:]) <= each[0] * 1.1


def test_scattered_blocks_cost_little() -> None:
    for heads in (1, 16, 128):
        cases = [Case(heads, (8192,), torch.bfloat16, scattered=scattered) for scattered in (False, True)]
        straight, scattered = seconds(*(case.ours() for case in cases))
        print(f"{heads} heads, scattered to consecutive: {scattered / straight:.2f}")
        assert scattered <= straight * 1.15


def test_time_grows_linearly_with_history() -> None:
    """From 8k on: what is shorter may lie in the processor's own caches, which few heads read faster than memory."""
    for heads in (1, 16, 128):
        cases = [Case(heads, (keys,), torch.bfloat16) for keys in (8192, 16384, 32768)]
        each = [time / case.lengths[0] for case, time in zip(cases, seconds(*(c.ours() for c in cases)), strict=True)]
        print(f"{heads} heads, a key of 8k, 16k, 32k:", *(f"{time / each[0]:.2f}" for time in each))
        assert max(each[1:]) <= each[0] * 1.25


def plain_loop() -> None:
    """Products of matrices that stay in a core's cache: what limits attention with 16 heads and more."""
    a, b, out = torch.ones(128, 576), torch.ones(576, 128), torch.empty(128, 128)
    for _ in range(60):
        torch.mm(a, b, out=out)


def at_once(*functions: Callable[[], Any]) -> float:
    """Seconds on the clock until all are done, each in a thread of its own that computes alone."""
    begin, times = threading.Barrier(len(functions)), []

    def work(function: Callable[[], Any]) -> None:
        torch.set_num_threads(1)
        begin.wait()
        times.append(time.perf_counter())
        function()
        times.append(time.perf_counter())

    threads = [threading.Thread(target=work, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(times) - min(times)


def on(threads: int, function: Callable[[], Any]) -> float:
    torch.set_num_threads(threads)
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_two_threads_do_it_in_little_more_than_half_the_time() -> None:
    """1.8 times as fast as one, or 0.95 of what two threads gain where each has a plain loop of its own.

    Two processors of a machine may be less than two cores.  In time on the
    clock, the least of many turns: others must leave both alone now and then.
    """
    for heads in (16, 128):
        whole, halves = Case(heads, (8192,), torch.bfloat16), [Case(heads, (4096,), torch.bfloat16) for _ in range(2)]
        ours, alone = whole.ours(), [half.ours() for half in halves]
        turns = {
            "one": lambda ours=ours: on(1, ours),
            "two": lambda ours=ours: on(2, ours),
            "two halves": lambda alone=alone: at_once(*alone),
            "a loop": lambda: at_once(plain_loop),
            "two loops": lambda: at_once(plain_loop, plain_loop),
        }
        least = dict.fromkeys(turns, float("inf"))
        for _ in range(40):
            for name, turn in turns.items():
                least[name] = min(least[name], turn())
        gained, machine = least["one"] / least["two"], 2 * least["a loop"] / least["two loops"]
        print(
            f"{heads} heads, 8k: two threads are {gained:.2f} times as fast as one, with half of the keys each and "
            f"nothing to merge {least['one'] / least['two halves']:.2f}, with a plain loop each {machine:.2f}"
        )
        assert gained >= min(1.8, 0.95 * machine)
