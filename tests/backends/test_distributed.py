"""One rank in each process on the host, over gloo: the CPU backend in a group, and what a group refuses."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mla_fx import Layout, backends, orchestrations
from mla_fx.backends.body import collective_of
from mla_fx.effects import Group, ops, schedule
from tests.backends import ranks as do
from tests.processes import Nursery, nursery
from tests.setups import Setup

FOUR = Group("dcp", 4)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(scope="module")
def processes() -> Iterator[Nursery]:
    with nursery() as made:
        yield made


@pytest.mark.parametrize(("name", "dtype"), [("cpu", "fp32"), ("cpu", "bf16"), ("reference", "fp32")])
@pytest.mark.parametrize("ranks", [1, 2, 4, Layout(tp=4, dcp=2), Layout(tp=4, dcp=1), Layout(tp=2, dp=2)], ids=str)
def test_step(processes, ranks, name, dtype):
    """The result of all ranks in one process, up to the order of the sum; the same bits on all ranks."""
    given = Setup(ranks=ranks, dtype=dtype)
    whole = backends.get(name, ranks=ranks)
    program = schedule(given.step, orchestrations.attention_aside)
    wanted, caches = given.compiled(whole, program)(*whole.put(given.arguments(), copy=True))
    found = processes.run(do.decode, ranks=given.ranks, name=name, setup=given)
    for rank, (out, *cache) in enumerate(found):
        torch.testing.assert_close(out, wanted[rank], rtol=0, atol=0.02 if dtype == "bf16" else 1e-6)
        assert torch.equal(out, found[given.layout.members("tp", rank)[0]][0])
        for ours, exactly in zip(cache, caches[rank], strict=True):
            assert torch.equal(ours, exactly)


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


def test_what_is_refused(processes):
    """The group before there is one and its name, another size, an adversary, arguments of all ranks where one runs."""
    what = "group: must be a group of torch.distributed, as dist.group.WORLD is after init_process_group"
    for messages in processes.run(do.refusals, ranks=2):
        assert messages == [
            f"{what}: got None",
            f"{what}: got 'x'",
            "ranks: must be the size of the group, 2: got 3, tp=3,dcp=3,dp=1,ep=3",
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
