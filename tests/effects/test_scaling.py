"""Time of schedule, law and listing grows with the layers of a model, and no faster: at most 2.2 times per doubling."""

import gc
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from attrs import evolve

from mla_fx import StepShape, orchestrations
from mla_fx.effects import Step, check, schedule
from mla_fx.models import deepseek_v3_config, model_step

GROWTH = 2.2


def step_of(layers: int) -> Step:
    config = evolve(deepseek_v3_config(), num_hidden_layers=layers)
    return model_step(config, StepShape(ranks=8, tokens=4, requests=4))


def work(step: Step) -> None:
    program = schedule(step, orchestrations.attention_aside)
    check(program)
    str(program)


def seconds(function: Callable[[], None]) -> float:
    """As `timeit` does, without the collector, which looks at everything that the process holds."""
    gc.disable()
    before = time.process_time()
    function()
    spent = time.process_time() - before
    gc.enable()
    return spent


def growth(counts: list[int], tries: int) -> list[float]:
    """How much longer each of these takes than the one before, the best of all tries of each."""
    steps = [step_of(layers) for layers in counts]
    best = [float("inf")] * len(steps)
    for _ in range(tries):  # in turns, so that a slow moment of the machine is not one count's alone
        best = [min(one, seconds(lambda step=step: work(step))) for one, step in zip(best, steps, strict=True)]
    return [later / earlier for earlier, later in pairwise(best)]


def test_time_doubles_with_the_layers():
    found = growth([15, 30, 60], tries=8)
    assert max(found) <= GROWTH, found


@pytest.mark.soak
def test_time_doubles_with_the_layers_up_to_244():
    found = growth([8, 16, 31, 61, 122, 244], tries=8)
    assert max(found) <= GROWTH, found
