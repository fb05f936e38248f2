"""One table of how fast this is beside what a user would run instead: `make bench`.

A file of this folder that has rows for it has a function

    def points(whole: bool = False) -> Iterator[Point]: ...   # `whole`: the whole grid, else what takes seconds

which yields a `Point` at a time, so that one point's tensors are gone before the next one's are made:

    Point("attention", "bf16, 128 heads, 4 requests of 8k", ours, {PAIR: pair, SDPA: sdpa},
          bytes=cache, operations=2 * multiply_adds, dtype="bf16", least={PAIR: 1.0})

All of a point's functions take nothing, do the same work once and return its result: a tensor, or a sequence of them,
which is held against ours before anything is timed (None is not).  They are timed in turns, in one process, on pinned
threads: a turn is some calls of each, and a ratio is of two times of one turn, so what slows the machine slows both.
Times are of the CPU on one thread and of the wall on more.  `measure` gives a `Row` for each point, with medians and
quartiles over turns; `print_table` prints them, with the part of the machine's limit that ours reaches.  The limits
are measured in the same run: products of torch at 2048^3, and the memory that a sum reads.

    python -m tests.benchmarks.table [--only attention] [--threads 1] [--seconds 1] [--whole]
"""

import argparse
import gc
import importlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from attrs import Factory, evolve, frozen

from mla_fx.backends.cpu import products
from tests.benchmarks.apart import Apart

Function = Callable[[], Any]

#: The columns, in this order; a point may have others, which come behind.
PAIR, SDPA, TRANSFORMERS = "torch pair", "torch SDPA", "transformers"
BY_HAND, ZENTORCH, VLLM = "by hand", "zentorch", "vLLM"
PEERS = (PAIR, SDPA, TRANSFORMERS, BY_HAND, ZENTORCH, VLLM)

TURN = 2e-3  # seconds that a turn of one function takes at least
FEWEST, MOST = 5, 40  # turns of a point
LONG = 1.0, 10  # seconds of a call, and times as long as the first function's: what takes more has one turn for all
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@frozen
class Point:
    """A row to be: `ours` against `peers`, by the name of their column.

    `bytes` and `operations` are what one call must read from memory and compute at least, a multiply-add being two
    operations; 0 where nobody knows.  `dtype` is that of its products, "fp32" or "bf16".  `least`: by peer, how many
    times as long as ours it must take at least.  `tolerance`: how far results may be apart, of the largest.
    """

    part: str
    name: str
    ours: Function
    peers: Mapping[str, Function]
    bytes: int = 0
    operations: int = 0
    dtype: str = "fp32"
    least: Mapping[str, float] = Factory(dict)
    tolerance: float = 0.1


@frozen
class Spread:
    """The median over turns, and the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@frozen
class Limits:
    """Of this machine, measured: operations a second of products by dtype, bytes a second that are read from memory."""

    products: Mapping[str, float]
    reading: float

    def seconds(self, point: Point) -> float:
        """What a point takes at least, 0 where nobody knows; bf16 may be multiplied as float32 where that is faster."""
        fastest = self.products["fp32"] if point.dtype == "fp32" else max(self.products.values())
        return max(point.operations / fastest, point.bytes / self.reading)


@frozen
class Row:
    """A point, measured: seconds of a call of ours, and by peer how many times as long it takes."""

    point: Point
    seconds: Spread
    ratios: Mapping[str, Spread]
    limit: float  # seconds that the machine needs at least, 0 where nobody knows

    @property
    def missed(self) -> dict[str, float]:
        """The peers that do not take as long as they must, and the ratio that was found."""
        of = {name: self.ratios[name].median for name in self.point.least}
        return {name: found for name, found in of.items() if found < self.point.least[name]}


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """As many of torch's threads on as many cores, the first that this process may use."""
    cores, before = os.sched_getaffinity(0), torch.get_num_threads()
    if not 1 <= threads <= len(cores):
        raise ValueError(f"threads: must be in 1..{len(cores)}, the cores of this process: got {threads}")
    os.sched_setaffinity(0, sorted(cores)[:threads])
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        os.sched_setaffinity(0, cores)


def clock() -> Callable[[], float]:
    """The clock of these measurements: the CPU's on one thread, which other processes do not move; else the wall's."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def in_turns(functions: Mapping[str, Function], seconds: float = 1.0) -> dict[str, list[float]]:
    """Seconds of a call of each function, turn by turn; as many turns as fit into so many seconds of the wall.

    Who comes first moves on by one each turn.  A function that takes `LONG` is timed once, behind a first call, which
    stands for every turn.
    """
    now, once = clock(), {name: _once(function) for name, function in functions.items()}
    shortest, times = LONG
    long = {name for name, spent in once.items() if spent > max(shortest, times * next(iter(once.values())))}
    calls = {name: max(1, int(TURN / max(spent, 1e-9))) for name, spent in once.items()}
    names = [name for name in functions if name not in long]
    spent: dict[str, list[float]] = {name: [] for name in functions}
    until, turn = time.perf_counter() + seconds, 0
    gc.collect()
    gc.disable()  # it looks at everything that the process holds, whoever made it
    try:
        while turn < FEWEST or (turn < MOST and time.perf_counter() <= until):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                spent[name].append(_turn(functions[name], calls[name], now))
            turn += 1
    finally:
        gc.enable()
    return spent | {name: [once[name]] * turn for name in long}


def _once(function: Function) -> float:
    """Seconds of a call, behind another, for what a first call makes."""
    function()
    return _turn(function, 1, clock())


def _turn(function: Function, calls: int, now: Callable[[], float]) -> float:
    """Seconds of one of so many calls; one in another process has its own clock there."""
    if isinstance(function, Apart):
        return function.seconds(calls)
    start = now()
    for _ in range(calls):
        function()
    return (now() - start) / calls


def limits(seconds: float = 1.0) -> Limits:
    """Of this machine, with as many threads as torch has now: the best that was seen."""
    size, least = 2048, {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if not products.has(dtype):
            continue  # number by number, which takes a minute and is nobody's limit
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        out = torch.empty_like(a)
        least[name] = min(in_turns({name: lambda a=a, b=b, out=out: torch.mm(a, b, out=out)}, seconds)[name])
    memory = torch.ones(1 << 26)  # 256 MiB, more than caches hold
    read = min(in_turns({"sum": memory.sum}, seconds)["sum"])
    return Limits({name: 2 * size**3 / spent for name, spent in least.items()}, memory.nbytes / read)


def measure(points: Iterable[Point], *, limit: Limits | None = None, seconds: float = 1.0) -> Iterator[Row]:
    """A row for each point, as many seconds of turns each; without limits, rows have none.

    Raises `AssertionError` where a peer's result is not ours.
    """
    for point in points:
        agree(point)
        spent = in_turns({"": point.ours, **point.peers}, seconds)
        ratios = {
            name: Spread.of([theirs / ours for theirs, ours in zip(spent[name], spent[""], strict=True)])
            for name in point.peers
        }
        least = limit.seconds(point) if limit else 0.0
        point = evolve(point, ours=_gone, peers={})  # its tensors must not outlive their row
        yield Row(point, Spread.of(spent[""]), ratios, least)


def _gone() -> None:
    """The function of a point that has been measured."""


def hold(points: Iterable[Point], seconds: float = 0.5) -> None:
    """Measure on one thread, print rows as they come, raise `AssertionError` where a peer takes less than it must."""
    missed = []
    with pinned(1), torch.no_grad():
        for row in measure(points, seconds=seconds):
            print(row.point.name, *(f"{name} {found}" for name, found in row.ratios.items()), sep=", ", flush=True)
            missed += [f"{row.point.name}: {row.missed}"] if row.missed else []
    assert not missed, "; ".join(missed)


def agree(point: Point) -> None:
    """Hold what the peers of a point compute against ours."""
    ours = _tensors(point.ours())
    for name, peer in point.peers.items():
        theirs = _tensors(peer())
        for one, other in zip(ours, theirs, strict=True) if ours and theirs else ():
            assert one.shape == other.shape, f"{point.name}, {name}: {tuple(other.shape)} for {tuple(one.shape)}"
            apart = (one.double() - other.double()).abs().max() / one.double().abs().max()
            assert apart <= point.tolerance, f"{point.name}, {name}: results are {apart:.1e} of the largest apart"


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    if result is None:
        return ()
    return (result.clone(),) if isinstance(result, torch.Tensor) else tuple(one.clone() for one in result)


def machine(threads: int) -> str:
    """What was measured on: processor, what it multiplies with, threads, torch."""
    info = Path("/proc/cpuinfo").read_text()
    names = [line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")]
    found = " ".join(flag for flag in FLAGS if f" {flag} " in info.replace("\n", " "))
    return (
        f"{names[0] if names else platform.machine()} ({found or 'no vector flags'}), {threads} of "
        f"{os.cpu_count()} cores, torch {torch.__version__}"
    )


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The table, in Markdown."""
    used = dict.fromkeys(name for row in rows for name in row.ratios)
    peers = [*filter(used.__contains__, PEERS), *(name for name in used if name not in PEERS)]
    yield f"| | | time | of the limit | {' | '.join(peers)} |"
    yield "|---|---|---|---|" + "---|" * len(peers)
    before = None
    for row in rows:
        part = row.point.part if row.point.part != before else ""
        before = row.point.part
        reached = f"{row.limit / row.seconds.median:.0%}" if row.limit else ""
        cells = [str(row.ratios.get(name, "")) for name in peers]
        yield f"| {' | '.join([part, row.point.name, _time(row.seconds.median), reached, *cells])} |"


def print_table(rows: Sequence[Row], limit: Limits, threads: int) -> None:
    """What was measured, on what, and the rows; below, what was to be reached and was not."""
    what = "CPU time" if threads == 1 else "time"
    print(f"{datetime.now(UTC):%Y-%m-%d}, {machine(threads)}.", end=" ")
    print(
        f"Products {', '.join(f'{name} {found / 1e9:.0f} GFLOP/s' for name, found in limit.products.items())}, reading "
        f"{limit.reading / 1e9:.1f} GB/s. {what} of a call, and how many times as long a peer takes (quartiles).\n"
    )
    print("\n".join(lines(rows)))
    for row in rows:
        for name, found in row.missed.items():
            print(f"missed: {row.point.part}, {row.point.name}: {name} {found:.2f} of {row.point.least[name]:.2f}")


def all_points(only: Sequence[str], whole: bool) -> Iterator[Point]:
    """The points of the files of this folder, or of those `only`, as in "attention" for `test_attention.py`."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if not only or path.stem.removeprefix("test_") in only:
            made = getattr(importlib.import_module(f"tests.benchmarks.{path.stem}"), "points", None)
            yield from made(whole) if made else ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where something was to be reached and was not."""
    parser = argparse.ArgumentParser(prog="make bench", description="How fast this is beside what a user would run.")
    parser.add_argument("--only", nargs="*", default=[], help="of these files, as in attention for test_attention.py")
    parser.add_argument("--threads", type=int, default=1, help="of torch, each on a core (default: 1)")
    parser.add_argument("--seconds", type=float, default=1.0, help="a point, at least (default: 1)")
    parser.add_argument("--whole", action="store_true", help="the whole grid: an hour, or hours")
    options = parser.parse_args(arguments)
    with pinned(options.threads), torch.no_grad():
        limit, rows = limits(), []
        with suppress(KeyboardInterrupt):  # then there are rows so far
            for row in measure(all_points(options.only, options.whole), limit=limit, seconds=options.seconds):
                rows.append(row)
                print(f"\r{len(rows)} points", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        print_table(rows, limit, options.threads)
    return int(any(row.missed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
