"""Time of schedule, law and listing grows with the layers of a model, and no faster: at most 2.2 times a doubling.

On a machine with other work, which takes the caches that more layers need, 2.5 times are let pass: a loop in a loop
would be 4.
"""

import gc
import math
import time
from collections.abc import Callable

import pytest
from attrs import evolve

from mla_fx import StepShape, orchestrations
from mla_fx.effects import Step, check, schedule
from mla_fx.models import deepseek_v3_config, model_step

GROWTH, BUSY = 2.2, 2.5


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


def growth(few: int, many: int, tries: int) -> float:
    """How much longer it takes with each doubling from few to many layers: the best of up to `tries` tries of each.

    A machine with other work only ever adds time, so three tries do unless the growth that they find is too large.
    """
    steps, best, found = (step_of(few), step_of(many)), [math.inf, math.inf], math.inf
    for done in range(tries):  # in turns, so that a slow moment of the machine is not one count's alone
        best = [min(one, seconds(lambda step=step: work(step))) for one, step in zip(best, steps, strict=True)]
        found = (best[1] / best[0]) ** (1 / math.log2(many / few))
        if done >= 2 and found <= GROWTH:
            break
    return found


def test_time_doubles_with_the_layers():
    assert growth(8, 64, tries=12) <= BUSY


@pytest.mark.soak
def test_time_doubles_with_the_layers_up_to_256():
    assert growth(16, 256, tries=12) <= GROWTH
