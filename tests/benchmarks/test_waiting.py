"""What waiting in slices costs: a sum over two processes, waited for as `Peers` does, beside the transport's own wait.

One message of each size is all-reduced by gloo, many times, in turn with the
one wait and with the other; by the clock, since it is waiting that is measured.
Run with `pytest -m bench --bench`.
"""

import statistics
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mla_fx.backends.peers import Peers
from tests.processes import Member

SIZES, TURNS = (16, 4096, 262144), 300


def waits(member: Member, *, size: int) -> tuple[list[float], list[float]]:
    """Seconds of each sum of `size` float32, as `Peers.meet` waits and bare."""
    group = member.join("gloo")
    peers, x = Peers.of(group, timeout=60), torch.ones(size)
    sliced, bare = [], []

    def alone(work: Any) -> None:
        work.wait()

    def turn(into: list[float], meet: Any) -> None:
        start = time.perf_counter()
        meet(dist.all_reduce(x, group=group, async_op=True))
        into.append(time.perf_counter() - start)

    for _ in range(TURNS):  # each comes behind itself and behind the other as often
        for into, meet in ((sliced, peers.meet), (bare, alone), (bare, alone), (sliced, peers.meet)):
            turn(into, meet)
        x.fill_(1)
    peers.leave()
    return sliced, bare


@pytest.mark.bench
@pytest.mark.parametrize("size", SIZES)
def test_waiting_in_slices_costs_nothing_that_is_seen(processes, size):
    """Of a sum that nothing disturbs, as the fastest tenth are, at most a fifth; the medians are printed beside."""
    found = processes.run(waits, ranks=2, size=size)
    (sliced, *_), (bare, *_) = fast = [statistics.quantiles(of, n=10) for of in found[0]]
    said = [f"{of[0] * 1e6:.0f} us, {of[4] * 1e6:.0f} in the middle" for of in fast]
    print(f"\n{4 * size:,} bytes: in slices {said[0]}; bare {said[1]}; {sliced / bare:.3f}")
    assert sliced <= 1.2 * bare
