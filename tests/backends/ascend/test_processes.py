"""One rank in each process, over the wheel's own process group and the emulated HCCL: results, and what goes wrong."""

import itertools
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mla_fx import Layout, backends, orchestrations
from mla_fx.backends import cpu
from mla_fx.effects import Group, Op, ops, schedule
from tests.backends.ascend import ranks as do
from tests.backends.ascend.conftest import random
from tests.backends.ascend.steps import setup
from tests.cases import mostly_soak
from tests.ops.conftest import Rules

ATOL = {"bf16": 0.06, "fp16": 0.008, "fp32": 2e-5}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))  # NaN is not equal to itself


# --- the decode step ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "dtype"), mostly_soak(itertools.product([2, 4, 8], ["bf16", "fp32"]), [(2, "fp32"), (4, "bf16")])
)
def test_step(processes, ranks, dtype):
    """Near the reference; under every seed the same bits, on all ranks, and those of all ranks in one process."""
    given = setup(dtype, ranks=ranks)
    found = processes.run(do.decode, ranks=ranks, sizes={}, dtype=dtype, orchestration="attention-aside", seeds=2)
    ((together,),) = processes.run(
        do.decode, ranks=1, together=ranks, sizes={}, dtype=dtype, orchestration="attention-aside", seeds=1
    )
    exact = backends.get("reference", ranks=ranks)
    right = given.compiled(exact, schedule(given.step, orchestrations.serial))
    wanted = right(*exact.put(given.arguments(), copy=True))
    for rank, by_seed in enumerate(found):
        out, *cache = by_seed[0]
        torch.testing.assert_close(out.double(), wanted[0][rank], rtol=0, atol=ATOL[dtype])
        for ours, exactly in zip(cache, wanted[1][rank], strict=True):
            torch.testing.assert_close(ours.double(), exactly, rtol=0, atol=ATOL[dtype])
        assert torch.equal(out, found[0][0][0])
        assert all(same(of_seed, by_seed[0]) for of_seed in by_seed)
        assert torch.equal(out, together[rank])
        assert same(cache, together[ranks + 2 * rank : ranks + 2 * rank + 2])


@pytest.mark.parametrize(("dtype", "layout"), [("bf16", Layout(tp=2, dp=2)), ("fp32", Layout(tp=4, dcp=2))], ids=str)
def test_step_of_a_model(processes, dtype, layout):
    """Experts over replicas, and context groups: the bits of all ranks in one process, under every seed."""
    asked = {"sizes": {"layers": 2, "ranks": layout}, "dtype": dtype, "orchestration": "attention-aside"}
    found = processes.run(do.decode, ranks=layout.size, seeds=2, **asked)
    ((together,),) = processes.run(do.decode, ranks=1, together=layout, seeds=1, **asked)
    for rank, by_seed in enumerate(found):
        assert all(same(of_seed, by_seed[0]) for of_seed in by_seed)
        assert torch.equal(by_seed[0][0], together[rank])


def test_other_orchestrations(processes):
    first, *others = (
        processes.run(do.decode, ranks=2, sizes={}, dtype="bf16", orchestration=name, seeds=3)
        for name in ("attention-aside", "serial", "exchange-aside")
    )
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert all(same(of_seed, ours[0]) for of_seed in theirs)


def test_own_heads_by_rank(processes):
    """A replicated query is sliced by the rank of the group, not by the place in this process."""
    given = setup("fp32", ranks=4, replicate_query=True)
    found = processes.run(
        do.decode, ranks=4, sizes={"replicate_query": True}, dtype="fp32", orchestration="attention-aside", seeds=1
    )
    exact = backends.get("reference", ranks=4)
    right = given.compiled(exact, schedule(given.step, orchestrations.serial))
    wanted, _ = right(*exact.put(given.arguments(), copy=True))
    for ((out, *_),) in found:
        torch.testing.assert_close(out.double(), wanted[0], rtol=0, atol=2e-5)


def test_each_process_has_a_device_of_its_own(processes):
    """Number LOCAL_RANK, with all that a step makes; the first before a backend is made, as torch has it."""
    for rank, found in enumerate(processes.run(do.places, ranks=2)):
        assert (found["before"], found["after"], found["found"]) == (0, rank, {rank})
        assert found["out"].isfinite().all()


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("8", "LOCAL_RANK: must be below the number of npu devices in sight, 8: got 8"),
        ("one", "LOCAL_RANK: must be the number of a process on its machine, from 0: got 'one'"),
    ],
)
def test_a_device_that_is_not_there(processes, told, message):
    assert processes.run(do.no_device, ranks=1, told=told) == [message]


@pytest.mark.parametrize(("ranks", "dtype"), mostly_soak([(2, "bf16"), (4, "fp32")], [(2, "bf16")]))
def test_steps_in_a_row(processes, ranks, dtype):
    """Issued one after the other; lengths change, caches grow over block borders."""
    queries = [((1, 2), (3, 0), (0, 1))[step % 3] for step in range(9)]
    found = processes.run(do.steps, ranks=ranks, dtype=dtype, queries=queries)
    given, exact = setup(dtype, ranks=ranks), backends.get("reference", ranks=ranks)
    right = given.compiled(exact, schedule(given.step, orchestrations.serial))
    caches, lengths = exact.put(given.caches(), copy=True), [0, 0]
    for step, query in enumerate(queries):
        want, caches = right(*exact.put((caches, given.hidden(), given.batches(tuple(lengths), query))))
        lengths = [length + new for length, new in zip(lengths, query, strict=True)]
        for outs in found:
            torch.testing.assert_close(outs[step].double(), want[0], rtol=0, atol=ATOL[dtype])
            assert torch.equal(outs[step], found[0][step])


# --- the collectives of the project --------------------------------------------------

NASTY = [65504.0, -7e4, 70000.25, 3e38, 1e-30, -1e-45, 0.0, -0.0, math.inf, -math.inf, math.nan, 128 - 2**-17]
BITS = {2: torch.int16, 4: torch.int32}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.element_size()])


def brought(processes, ranks: int, asked: list[tuple[Op, list[tuple[torch.Tensor, ...]]]]) -> list[list[Any]]:
    """For each op, what every rank got of it, with its collectives."""
    return list(zip(*processes.run(do.collectives, ranks=ranks, asked=asked), strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_to_all_bit_for_bit(processes, ranks):
    """Infinities, NaN payloads and subnormals of an LSE and of an output; one message of bytes; nobody waits."""
    op, own, asked = ops.AllToAll(Group("dcp", ranks)), 4 // ranks, []
    for dtype in DTYPES:
        given = []
        for rank in range(ranks):
            lse = torch.tensor(NASTY, dtype=torch.float32).roll(rank).view(3, 4)
            lse.view(torch.int32)[0, rank] = 0x7F800001 + rank  # a signalling NaN
            out = bits(torch.arange(96, dtype=torch.float32).to(dtype)).mul(677 + rank).view(dtype).view(3, 4, 8)
            given.append((out, lse))
        asked.append((op, given))
    for found, (_, given) in zip(brought(processes, ranks, asked), asked, strict=True):
        for rank, (got, trace) in enumerate(found):
            for k, ours in enumerate(got):
                exactly = torch.stack([sent[k][:, rank * own : (rank + 1) * own] for sent in given])
                assert ours.dtype == exactly.dtype and torch.equal(bits(ours), bits(exactly))
            moved = sum(ours.nbytes for ours in got)  # the LSE's bits go beside the output, in one message
            assert [(task.name, task.operands) for task in trace] == [("all_to_all", ((torch.uint8, (moved,)),))]


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        (4, [(ops.GatherHeads(Group("dcp", 4)), ((3, 2, 8), (3, 2, 4)))]),
        (2, [(ops.AllGather(9, Group("tp", 2)), ((3, 5),)), (ops.AllGather(10, Group("tp", 2)), ((1, 5),))]),
    ],
    ids=["heads", "features"],
)
def test_gathers_bit_for_bit(processes, ranks, wanted):
    rng, asked = np.random.default_rng(3), []
    for dtype, (op, shapes) in itertools.product(DTYPES, wanted):
        given = [tuple(random(rng, *shape, dtype=dtype) for shape in shapes) for _ in range(ranks)]
        bits(given[1][0]).view(-1)[:2] = torch.tensor([0x7F81, 1])  # a signalling NaN, a subnormal
        asked.append((op, given))
    for found, (op, given) in zip(brought(processes, ranks, asked), asked, strict=True):
        exact = Rules(cpu.TABLE, given[0][0].dtype).group(op, given)
        for (ours, trace), exactly in zip(found, exact, strict=True):
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours, exactly, strict=True))
            assert [task.name for task in trace] == ["all_gather"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_reduce(processes, ranks):
    """In rank order, in float32, rounded once, on all ranks: the bits of the CPU's rule, in two messages."""
    rng, op = np.random.default_rng(5), ops.AllReduce(Group("tp", ranks))
    asked = [
        (op, [(random(rng, 3, 4, dtype=dtype) * 10.0 ** (2 - rank),) for rank in range(ranks)]) for dtype in DTYPES
    ]
    for found, (_, given) in zip(brought(processes, ranks, asked), asked, strict=True):
        exact = Rules(cpu.TABLE, given[0][0].dtype).group(op, given)
        for ((ours,), trace), (exactly,) in zip(found, exact, strict=True):
            assert torch.equal(ours, exactly)
            assert [task.name for task in trace] == ["all_to_all", "all_gather"]


def test_no_tokens(processes):
    """A step of nothing moves nothing, on any rank."""
    given = [(torch.empty(0, 4, 8), torch.empty(0, 4))] * 2
    (found,) = brought(processes, 2, [(ops.AllToAll(Group("dcp", 2)), given)])
    for ours, trace in found:
        assert [out.shape for out in ours] == [(2, 0, 2, 8), (2, 0, 2)] and not trace


# --- the emulated HCCL ---------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_the_wheel_asks_of_it(processes, ranks):
    for rank, got in enumerate(processes.run(do.transports, ranks=ranks)):
        assert got["broadcast"].tolist() == [ranks - 1] * 3
        uneven = []
        for source in range(ranks):
            begin = sum(source + other for other in range(rank))
            uneven += [100 * source + begin + k for k in range(source + rank)]
        assert got["uneven"].tolist() == uneven
        mine = [2.0 * rank, 2.0 * rank + 1]
        assert got["scattered"].tolist() == [ranks * x + sum(range(ranks)) for x in mine]
        assert got["max"].tolist() == [ranks - 1, 0] and got["min"].tolist() == [0, 1 - ranks]
        if rank in (0, ranks - 1):
            assert got["pair"].tolist() == [ranks - 1] * 2
        if rank == ranks - 1:
            assert got["sent"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_number_is_summed_right(processes, dtype):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    given = [[every, every.roll(shift)] for shift in (1, 12345)]
    for totals in processes.run(do.sums, ranks=2, operands=given):
        for got, (first, second) in zip(totals, given, strict=True):
            wanted = (first.float() + second.float()).to(dtype)
            assert torch.equal(got.isnan(), wanted.isnan())
            assert torch.equal(bits(got)[~got.isnan()], bits(wanted)[~wanted.isnan()])


def test_an_operand_is_read_late(processes):
    """Who overwrites it without waiting for the collective has sent something else, under some seed."""
    assert processes.run(do.overwritten, ranks=2, seeds=6, waits=True) == [[16.0] * 6] * 2
    assert processes.run(do.overwritten, ranks=2, seeds=6, waits=False) != [[16.0] * 6] * 2


def test_other_streams_go_on(processes):
    assert processes.run(do.elsewhere, ranks=2) == [8.0, 8.0]


def test_a_device_works_while_its_host_waits_for_something_else(processes):
    assert processes.run(do.busy, ranks=2) == [8.0, 8.0]


def test_two_groups_do_not_hold_each_other_up(processes):
    assert processes.run(do.two_groups, ranks=2) == [[2.0, 6.0]] * 2


MISMATCHES = {
    "op": ("rank 0 is in all_reduce (sum) of 4 fp32", "rank 2 in all_gather of 4 fp32"),
    "count": ("rank 0 is in all_reduce (sum) of 4 fp32", "rank 2 in all_reduce (sum) of 6 fp32"),
    "dtype": ("rank 0 is in all_reduce (sum) of 4 fp32", "rank 2 in all_reduce (sum) of 4 fp16"),
    "splits": ("rank 0 sends 4 bytes", "rank 2 awaits 8"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_do_not_match(processes, what):
    """An error on the ranks that see it, which names both; soon, and never a hang."""
    found = processes.outcomes(do.mismatch, ranks=3, what=what)
    for outcome in found if what != "splits" else found[2:]:
        assert outcome.error is not None and "RuntimeError" in outcome.error
        assert all(part in outcome.error for part in MISMATCHES[what]), outcome.error
        assert outcome.seconds < 60
    assert all(outcome.error is None or "RuntimeError" in outcome.error for outcome in found)


def test_a_group_after_a_fault(processes):
    for first, second in processes.run(do.recovered, ranks=2):
        assert "must be the same on all ranks" in first
        assert "a fault threw collectives away; make the group anew" in second


ABSENCES = {
    "ends": "rank 2 is gone (process {process} ended)",
    "leaves": "rank 2 has left the group",
    "stays away": "waited too long for peers: rank 2 has entered 1 collectives",
}


@pytest.mark.parametrize("how", ABSENCES)
def test_a_rank_that_is_missing(processes, how):
    """The others fail: at once when it is gone, after HCCL_EXEC_TIMEOUT when it does not come."""
    *found, last = processes.outcomes(do.absence, ranks=3, how=how)
    for outcome in found:
        assert outcome.error is not None and "RuntimeError" in outcome.error
        assert ABSENCES[how].format(process=last.process) in outcome.error, outcome.error
        assert outcome.seconds < 60
    assert last.error == ("ended with status 7" if how == "ends" else None)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm to look into")
def test_nothing_stays_behind(processes):
    """Whatever became of the processes; names carry the process that made the group."""
    found = processes.outcomes(do.absence, ranks=2, how="ends") + processes.outcomes(do.transports, ranks=2)
    made = {f"mla_fx-hccl-{outcome.process}-" for outcome in found}
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(tuple(made))]


# --- what a probe asks of a group --------------------------------------------------


GROUPED = [(11, "all_gather"), (11, "all_to_all"), (12, "4 KB"), (12, "64 KB"), (12, "1 MB")]


def probed(processes, last: str) -> tuple[list[str], list[str], set[str]]:
    """Verdicts of both ranks for what a group is asked, and what the first one says to sums."""
    first, second = processes.run(do.probe, ranks=2, last=last)
    assert [(one.point, one.case) for one in first] == [(1, "first"), *GROUPED]
    verdicts = [[one.outcome.verdict for one in found[1:]] for found in (first, second)]
    return *verdicts, {one.outcome.detail for one in first[3:]}


def test_a_probe_of_several_ranks(processes):
    """Every pattern of 16 bits arrives as it was sent, and sums have the same bits on all ranks."""
    first, second, _ = probed(processes, "well")
    assert first == second == ["holds"] * 5


def test_a_probe_sees_transports_that_tidy_up(processes):
    """Payloads where they were tidied; sums on all ranks, since no rank can say which one is off."""
    first, second, said = probed(processes, "tidy")
    assert first == ["holds"] * 2 + ["differs"] * 3 and second == ["differs"] * 5
    assert all(detail.startswith("ranks have different bits, with HCCL") for detail in said)


def test_a_probe_goes_into_no_collective_alone(processes):
    """A rank whose device has died keeps the others out."""
    first, second, said = probed(processes, "died")
    assert first == second == ["not run"] * 5
    assert said == {"rank 1: the device has faulted in point 1, first"}


def test_a_probe_goes_on_after_a_rank_that_is_refused(processes):
    first, second, said = probed(processes, "refuses")
    assert first == ["holds"] * 2 + ["differs"] * 3 and second == ["holds"] * 2 + ["refused"] * 3
    assert said == {"rank 1 did not get as far"}
