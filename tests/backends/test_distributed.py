"""One rank in each process on the host, over gloo: the CPU backend in a group, and what a group refuses."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from mla_fx import Layout, backends, orchestrations
from mla_fx.backends.meter import Metered, Tally
from mla_fx.backends.rules import collective_of
from mla_fx.effects import Group, ops, schedule
from mla_fx.effects.cost import on_the_wire
from tests.backends import ranks as do
from tests.setups import Setup

FOUR = Group("dcp", 4)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


STEPS = {
    "one rank": ("cpu", Setup(ranks=1)),
    "two": ("cpu", Setup(ranks=2, dtype="bf16")),
    "four, exact": ("reference", Setup(ranks=4)),
    "context groups": ("cpu", Setup(ranks=Layout(tp=4, dcp=2))),
    "context groups of one": ("cpu", Setup(ranks=Layout(tp=4, dcp=1), dtype="fp16")),
    "replicas": ("cpu", Setup(ranks=Layout(tp=2, dp=2))),
    "a model": ("cpu", Setup(ranks=Layout(tp=8, dcp=4), layers=2)),
    "experts over replicas": ("cpu", Setup(ranks=Layout(tp=4, dcp=2, dp=2), layers=2, dtype="bf16")),
    "experts in 8 bits": ("cpu", Setup(ranks=Layout(tp=2, dp=2), layers=2, quantization="w8a8")),
}


@pytest.mark.parametrize(("name", "given"), STEPS.values(), ids=STEPS)
def test_step(processes, name, given):
    """The bits of all ranks in one process, on all ranks."""
    asked = do.Asked.of(given)
    (together,) = processes.run(do.decode, ranks=1, name=name, asked=asked, together=True)
    apart = processes.run(do.decode, ranks=given.ranks, name=name, asked=asked)
    assert all(alike(found, wanted) for (found,), wanted in zip(apart, together, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_what_moves_arrives_bit_for_bit(processes, dtype):
    rng = np.random.default_rng(4)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Any bits."""
        count = int(np.prod(shape)) * dtype.itemsize
        return torch.from_numpy(rng.integers(0, 256, count, dtype=np.uint8)).view(dtype).view(shape)

    for op, shapes in (
        (ops.AllToAll(FOUR), (((3, 4, 5), dtype), ((3, 4), wide))),
        (ops.GatherHeads(FOUR), (((3, 2, 8), dtype), ((3, 2, 4), dtype))),
        (ops.AllGather(18, FOUR), (((3, 5), dtype),)),
    ):
        given = [tuple(drawn(*shape, dtype=of) for shape, of in shapes) for _ in range(4)]
        found = processes.run(do.collective, ranks=4, op=op, operands=given)
        together = collective_of(backends.get("cpu", ranks=4), op)(*(x for mine in given for x in mine))
        for rank, ours in enumerate(found):
            for a, b in zip(ours, together[rank * len(ours) : (rank + 1) * len(ours)], strict=True):
                assert (a[0] if isinstance(op, ops.AllToAll) else a).is_contiguous()
                assert torch.equal(a.view(BITS[dtype.itemsize]), b.view(BITS[dtype.itemsize]))


def test_what_is_said_is_heard_by_all(processes):
    """Values of any length, those of each rank at its place; and in one process all say the same."""
    said = [[[], None, (1, 2.5)], ["x" * 10, "y" * 5000, {"z": [3] * 700}], [1, 2, 3]]
    assert processes.run(do.shared, ranks=3, said=said) == [said] * 3
    assert backends.get("cpu", ranks=3).share((1, "a")) == [(1, "a")] * 3


SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def summands(ranks: int) -> list[list[torch.Tensor]]:
    """For each rank, what it adds, in sizes that ranks divide or not, fewer than ranks, none; sums feel their order."""
    generator, shapes = torch.Generator().manual_seed(ranks), ((2,), (3, 5), (4, 2 * ranks), (1, 1), (0, 4))
    return [
        [
            (torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (rank % 3)).to(dtype)
            for dtype in SUMMED
            for shape in shapes
        ]
        for rank in range(ranks)
    ]


def in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """By the definition: rank after rank, in float32 (float64 beside float64), rounded once."""
    dtype = parts[0].dtype
    total = torch.zeros(parts[0].shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for part in parts:
        total = total + part.to(total.dtype)
    return total.to(dtype)


def alike(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_in_rank_order(processes, ranks):
    """Every bit is that of the definition, on all ranks, whatever the transport's own sums would be."""
    given = summands(ranks)
    wanted = [in_order(parts) for parts in zip(*given, strict=True)]
    for spent in (False, True):
        found = processes.run(do.sums, ranks=ranks, operands=given, sums="rank order", spent=spent)
        assert all(alike(totals, wanted) for totals, _ in found)
        assert spent or all(alike(left, own) for (_, left), own in zip(found, given, strict=True))


def test_sums_by_a_transport_that_adds_as_each_rank_likes(processes):
    """Planted: each rank begins with its own.  Ranks then differ, unless they add in rank order."""
    given = summands(4)
    loose = [totals for totals, _ in processes.run(do.sums, ranks=4, operands=given, sums="transport", planted=True)]
    assert not all(alike(totals, loose[0]) for totals in loose)
    firm = [totals for totals, _ in processes.run(do.sums, ranks=4, operands=given, sums="rank order", planted=True)]
    assert all(alike(totals, firm[0]) for totals in firm)


def test_messages_of_a_sum(processes):
    """Two in rank order, of 2 (W - 1) / W of the bytes from each rank together; one by the transport."""
    for ranks, size in ((2, 6), (4, 8)):
        given = [[torch.ones(size)] for _ in range(ranks)]
        for asked in processes.run(do.messages, ranks=ranks, operands=given, sums="rank order"):
            assert asked == [("all_to_all", size * 4), ("all_gather", size * 4 // ranks)]
            sent = sum(on_the_wire(how, ranks, handed) for how, handed in asked)
            assert sent == on_the_wire("all_reduce", ranks, size * 4) == 2 * (ranks - 1) * size * 4 // ranks
        for asked in processes.run(do.messages, ranks=ranks, operands=given, sums="transport"):
            assert asked == [("all_reduce", size * 4)]


def test_what_is_refused(processes):
    """The group before there is one and its name, another size, an adversary, arguments of all ranks where one runs."""
    what = "group: must be a group of torch.distributed, as dist.group.WORLD is after init_process_group"
    for messages in processes.run(do.refusals, ranks=2):
        assert messages == [
            f"{what}: got None",
            f"{what}: got 'x'",
            "ranks: must be the size of the group, 2: got 3, tp=3,dcp=3,dp=1,ep=3",
            "sums: must be one of rank order, transport: got 'mean'",
            "adversary: it plays all ranks on the host: got seed 5 for 1 of 2 ranks on cpu",
            "cache: must be a sequence with one entry for each of 1 ranks: got list of 2",
        ]
    (error,) = [outcome.error for outcome in processes.outcomes(do.stranger, ranks=2) if outcome.error]
    assert "InputError: group: this process must be a rank of it" in error


def test_a_rank_that_raises_is_reported(processes):
    """The helper of these tests hides nothing: an error, an end and a hang are what came of a rank."""
    first, second, third = processes.outcomes(do.misfortune, ranks=3, limit=2.0)
    assert first.error is not None and "ZeroDivisionError" in first.error
    assert second.error == "ended with status 3" and third.error == "ended with status -9"
    with pytest.raises(AssertionError, match="rank 0: "):
        processes.run(do.misfortune, ranks=1)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4, dcp=2)], ids=str)
def test_a_meter_counts_in_a_group_what_it_counts_in_one_process(processes, layout):
    given = Setup(layers=2, ranks=layout)
    metered = Metered.of(backends.get("cpu", ranks=layout))
    run = given.compiled(metered, schedule(given.step, orchestrations.attention_aside))
    run(*metered.put(given.arguments(), copy=True))
    found = processes.run(do.metered, ranks=layout.size, asked=do.Asked.of(given))
    apart = {place: tally for moved, _ in found for place, tally in moved.items()}
    assert apart.keys() == metered.meter.moved.keys()
    for place, tally in apart.items():  # a sum in rank order is two messages
        count = metered.meter.moved[place].messages * (2 if place.op == "all_reduce" else 1)
        wanted = metered.meter.moved[place]
        assert tally == Tally(count, wanted.sent, count, wanted.priced)
    # A sum is made in the memory of what is summed, where a process has that for itself.
    assert all(values <= metered.meter.values[rank] for rank, (_, values) in enumerate(found))
