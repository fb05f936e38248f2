"""The table of benchmarks: ratios of known work, results that are held against each other, and what it prints."""

import os
import time
import weakref
from itertools import groupby

import pytest
import torch

from tests.benchmarks.apart import Apart
from tests.benchmarks.table import (
    BY_HAND,
    PAIR,
    SDPA,
    Limits,
    Point,
    Row,
    Spread,
    all_points,
    hold,
    in_turns,
    lines,
    main,
    measure,
    pinned,
    print_table,
)


def working(seconds: float, result=None):
    """A function that takes so much time of the CPU."""

    def work():
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        return result

    return work


def point(**given) -> Point:
    return Point(**{"part": "sums", "name": "of two", "ours": working(1e-3), "peers": {}, **given})


def test_ratios_are_those_of_the_work():
    """One that takes 3 times as long and one that takes half as long, whatever else the machine does."""
    with pinned(1):
        (row,) = measure([point(peers={PAIR: working(3e-3), SDPA: working(5e-4)})], seconds=0.05)
    assert row.ratios[PAIR].median == pytest.approx(3, rel=0.1)
    assert row.ratios[SDPA].median == pytest.approx(0.5, rel=0.1)
    assert row.seconds.median == pytest.approx(1e-3, rel=0.1)
    assert row.seconds.low <= row.seconds.median <= row.seconds.high


def test_all_take_turns():
    """Who comes first moves on, and what is fast is called more often in a turn, so that the clock can tell."""
    order: list[str] = []

    def noted(name: str, seconds: float):
        return lambda: (order.append(name), working(seconds)())

    with pinned(1):
        spent = in_turns({"a": noted("a", 2e-4), "b": noted("b", 5e-3)}, seconds=0)
    assert [len(of) for of in spent.values()] == [5, 5]
    runs = [(name, len([*of])) for name, of in groupby(order[4:])]  # ab, ba, ab, ba, ab
    often = runs[0][1]
    assert often >= 5 and runs == [("a", often), ("b", 2), ("a", 2 * often), ("b", 2), ("a", 2 * often), ("b", 1)]


def test_what_takes_long_has_one_turn_for_all(monkeypatch):
    """Beside ours: two calls, however many turns there are; one that takes as long as ours has as many turns."""
    monkeypatch.setattr("tests.benchmarks.table.LONG", (0.005, 3))
    called: list[str] = []

    def noted(name: str, seconds: float):
        return lambda: (called.append(name), working(seconds)())

    with pinned(1):
        spent = in_turns(
            {"": noted("ours", 6e-3), "long": noted("long", 3e-2), "alike": noted("alike", 7e-3)}, seconds=0
        )
    assert [called.count(name) for name in ("ours", "long", "alike")] == [7, 2, 7]
    assert len(spent["long"]) == len(spent[""]) == 5 and len(set(spent["long"])) == 1
    assert spent["long"][0] == pytest.approx(0.03, rel=0.1)


class Elsewhere(Apart):
    """A peer in another process that says what it likes."""

    def seconds(self, calls: int) -> float:
        return 2e-3


def test_one_in_another_process_times_itself():
    with pinned(1):
        (row,) = measure([point(ours=working(1e-3), peers={"else": Elsewhere("nobody", {})})], seconds=0)
    assert row.ratios["else"].median == pytest.approx(2, rel=0.1)


def test_a_process_that_ends_is_told():
    """One without such a peer ends at once."""
    peer = Apart("nobody", {})
    with pytest.raises(RuntimeError, match="nobody: its process ended with 1"):
        peer()


def test_what_computes_something_else_is_not_timed():
    ours = torch.tensor([1.0, -2.0])
    near, far = ours + 0.01, ours + 0.3
    given = {"ours": working(0, ours), "tolerance": 0.02}
    assert list(measure([point(**given, peers={PAIR: working(0, near), SDPA: working(0)})], seconds=0))
    with pytest.raises(AssertionError, match=r"of two, torch pair: results are 1.5e-01 of the largest apart"):
        list(measure([point(**given, peers={PAIR: working(0, (far,))})], seconds=0))
    with pytest.raises(AssertionError, match=r"of two, torch SDPA: \(1, 2\) for \(2,\)"):
        list(measure([point(**given, peers={SDPA: working(0, near[None])})], seconds=0))


def test_the_limit_is_the_later_of_both():
    limit = Limits({"fp32": 100.0, "bf16": 400.0}, reading=10.0)
    assert limit.seconds(point(operations=200, bytes=10)) == 2
    assert limit.seconds(point(operations=200, bytes=10, dtype="bf16")) == 1
    assert Limits({"fp32": 100.0}, 10.0).seconds(point(operations=200, dtype="bf16")) == 2  # multiplied as float32
    assert limit.seconds(point()) == 0


def row(part: str, seconds: float, ratios: dict[str, float], **given) -> Row:
    spread = {name: Spread(found - 0.5, found, found + 0.5) for name, found in ratios.items()}
    return Row(point(part=part, **given), Spread(0, seconds, 1), spread, limit=0.003 if ratios else 0)


def test_the_table():
    rows = [
        row("sums", 0.012, {"mine": 2.0, BY_HAND: 1.25}),
        row("sums", 2e-5, {PAIR: 3.0}),
        row("layer", 1.5, {}),
    ]
    assert list(lines(rows)) == [
        "| | | time | of the limit | torch pair | by hand | mine |",
        "|---|---|---|---|---|---|---|",
        "| sums | of two | 12 ms | 25% |  | 1.25 (0.75-1.75) | 2.00 (1.50-2.50) |",
        "|  | of two | 20 us | 15000% | 3.00 (2.50-3.50) |  |  |",
        "| layer | of two | 1.5 s |  |  |  |  |",
    ]


def test_what_was_to_be_reached_is_told(capsys):
    bounds = {"least": {PAIR: 2.0, SDPA: 1.0}}
    print_table([row("sums", 1, {PAIR: 1.9, SDPA: 1.1}, **bounds)], Limits({"fp32": 5e10}, 2e10), threads=1)
    printed = capsys.readouterr().out
    assert "Products fp32 50 GFLOP/s, reading 20.0 GB/s. CPU time of a call" in printed
    assert f"1 of {os.cpu_count()} cores, torch {torch.__version__}" in printed
    assert printed.splitlines()[-1] == "missed: sums, of two: torch pair 1.90 of 2.00"
    assert printed.count("missed") == 1


def test_a_point_is_gone_before_the_next_one_is_made():
    """With what it holds, though its row is kept: the next may need the memory."""
    held: list[weakref.ref[object]] = []

    def made() -> Point:
        work = working(1e-4)
        held.append(weakref.ref(work))
        return point(ours=work, peers={PAIR: working(1e-4)})

    def points():
        yield made()
        assert held[0]() is None
        yield made()

    assert len(list(measure(points(), seconds=0))) == len(held) == 2


def test_a_limit_is_held(capsys):
    """Each point that misses one is named, when all have been measured."""
    near, far = (point(name=f"{n} times", peers={PAIR: working(n * 1e-3)}, least={PAIR: 2.0}) for n in (3, 1))
    hold([near], seconds=0)
    with pytest.raises(AssertionError, match=r"^1 times: {'torch pair': [01]\.\d*}$"):
        hold([far, near], seconds=0)
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == ["3 times", "1 times", "3 times"]


def test_as_many_threads_as_cores():
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with pinned(1):
        assert len(os.sched_getaffinity(0)) == torch.get_num_threads() == 1
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, threads)
    with (
        pytest.raises(ValueError, match=rf"threads: must be in 1..{len(cores)}, .*: got {len(cores) + 1}"),
        pinned(len(cores) + 1),
    ):
        pass


def test_help_and_a_file_without_points(capsys):
    assert not list(all_points(["table", "nothing of that name"], whole=True))
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--whole" in capsys.readouterr().out
