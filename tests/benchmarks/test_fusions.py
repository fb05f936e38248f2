"""What fusing a step costs before it runs: the time to lower, schedule and compile, and memory, with it and without.

61 layers of attention on the emulated device; CPU time of this thread, in one run and in turn, as ratios.  What is
compiled takes its time by the launch, of which a fused step has fewer; the passes look at every layer.
Run with `pytest -m bench --bench`.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
from attrs import frozen

from mla_fx import backends, orchestrations
from mla_fx.backends import Backend
from mla_fx.backends.ascend import fused
from mla_fx.effects import Step, cost, schedule
from tests.backends.ascend.conftest import machine  # noqa: F401
from tests.backends.ascend.steps import LATENT
from tests.setups import Setup

LAYERS, TURNS = 61, 5


@frozen
class Compiled:
    """Seconds to lower, to schedule and to compile; and what came of it."""

    lowered: float
    scheduled: float
    compiled: float
    launches: int
    peak: int

    @property
    def seconds(self) -> float:
        return self.lowered + self.scheduled + self.compiled


def timed(function: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    start = time.thread_time()
    result = function(*given)
    return time.thread_time() - start, result


def compiled(backend: Backend, step: Step, prepared: Any) -> Compiled:
    lowered, whole = timed(backend.lower, step)
    scheduled, program = timed(schedule, whole, orchestrations.attention_aside)
    seconds, _ = timed(backend.compile, program, prepared)
    return Compiled(lowered, scheduled, seconds, len(program.launches), cost(program).memory.peak)


@pytest.mark.bench
@pytest.mark.parametrize("ranks", [1, 8])
def test_fusions_save_what_they_take(machine, ranks):  # noqa: F811
    """Compiling a fused step takes as long as the step as it is, within a quarter for noise, and no more memory."""
    given = Setup(ranks=ranks, layers=LAYERS, dtype="bf16", config=LATENT, block_size=16)
    whole = backends.get("ascend", ranks=ranks)
    apart = whole.without_fusions(*fused.ALL)
    params, step = given.params(), given.step
    ready = [(backend, backend.prepare(backend.lower(step), params)) for backend in (whole, apart)]
    found = [[compiled(backend, step, prepared) for backend, prepared in ready] for _ in range(TURNS)]
    best = [min(of, key=lambda one: one.seconds) for of in zip(*found, strict=True)]
    ratio = best[0].seconds / best[1].seconds
    for name, one in zip(("fused", "apart"), best, strict=True):
        print(
            f"\n{ranks} ranks, {name}: {one.launches} launches, lowered in {one.lowered:.2f} s, scheduled in "
            f"{one.scheduled:.2f} s, compiled in {one.compiled:.2f} s, values of {one.peak / 1e6:.3f} MB at most"
        )
    print(f"{ratio:.2f} of the time")
    assert ratio <= 1.25
    assert best[0].launches < best[1].launches and best[0].peak <= best[1].peak
