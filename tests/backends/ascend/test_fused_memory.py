"""Memory of fused steps, on paper: no fusion lets values live longer than they would, at the sizes of DeepSeek-V3."""

from functools import cache

import pytest
from attrs import evolve

from mla_fx import StepShape, orchestrations
from mla_fx.backends import ascend
from mla_fx.backends.ascend import fused
from mla_fx.effects import Keep, Program, Step, cost, schedule
from mla_fx.models import deepseek_v3_config, model_step

LAYERS = 4  # three dense ones, and one with experts
CASES = [(4, None, False), (256, None, True), (4, "w8a8", True), (256, "w8a8", False)]


@cache
def step(tokens: int, kind: str | None, rounded: bool) -> Step:
    shape = StepShape(ranks=8, tokens=tokens, requests=4, quantization=kind, round_angles=rounded)
    return model_step(evolve(deepseek_v3_config(), num_hidden_layers=LAYERS), shape)


def program(given: Step, orchestration: str) -> Program:
    return schedule(given, orchestrations.NAMED[orchestration])


@pytest.mark.parametrize("orchestration", ["serial", "attention-aside"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peak_of_values_does_not_grow(case, orchestration):
    """By any one fusion, and by all together; what is kept stays nothing, workspaces and states are the same."""
    apart = program(step(*case), orchestration)
    steps = [fusion.find(step(*case)) for fusion in fused.ALL]
    whole = step(*case)
    for one in ascend.TABLE.passes:
        whole = one(whole)
    for given in (*(found for found in steps if found != step(*case)), whole):
        lean = program(given, orchestration)
        ours, theirs = cost(lean), cost(apart)
        assert ours.memory.peak <= theirs.memory.peak
        assert ours.launches <= theirs.launches and ours.keeps == lean.count(Keep) == 0
        assert (ours.memory.parameters, ours.memory.states) == (theirs.memory.parameters, theirs.memory.states)
        used = [{name for launch in one.launches for name in launch.op.uses} for one in (lean, apart)]
        assert used[0] == used[1] and len(used[0]) == 1
    assert sum(found != step(*case) for found in steps) >= 5
