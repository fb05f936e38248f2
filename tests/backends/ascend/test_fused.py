"""All fusions of the Ascend table: the same bits by their definitions, near the same by their operators."""

import itertools

import pytest
from torch.utils import _pytree as pytree

from mla_fx import backends, orchestrations
from mla_fx.backends import ascend
from mla_fx.backends.ascend import fused
from mla_fx.backends.ascend.emulator.releases import NEWEST, RELEASES
from mla_fx.effects import Step, check, schedule
from tests.backends.ascend.experts import Experts
from tests.backends.ascend.steps import ascend as on_ascend
from tests.backends.ascend.steps import equal, leaves, setup
from tests.cases import mostly_soak
from tests.setups import ANYWHERE, Setup

STEPS = {
    "attention": {},
    "rounded angles": {"round_angles": True},
    "padding": {"tokens": 5},
    "replicated query": {"replicate_query": True},
    "8 bits": {"quantization": "w8a8"},
    "two layers": {"layers": 2},
    "two layers, rounded angles, padding": {"layers": 2, "round_angles": True, "tokens": 5},
}
WHOLE = [*STEPS][-1]
each_step = pytest.mark.parametrize("sizes", STEPS.values(), ids=STEPS)


def lowered(given: Setup | Experts) -> Step:
    step = given.step
    for one in ascend.TABLE.passes:
        step = one(step)
    return step


def ops_of(step: Step) -> set[type]:
    return {type(equation.op) for equation in step.equations}


def test_every_fusion_is_found_in_some_step():
    steps = [*(setup("bf16", **sizes) for sizes in STEPS.values()), Experts(quantization="w8a8", shared=1)]
    found = set().union(*(ops_of(lowered(given)) for given in steps))
    assert {fusion.op for fusion in fused.ALL} <= found


@each_step
def test_a_lowered_step_is_one_like_any_other(sizes):
    """The same inputs and outputs, legal under orchestrations of any step, and nothing more to find."""
    given = setup("bf16", **sizes)
    step = lowered(given)
    assert (step.inputs, step.outputs, step.tree) == (given.step.inputs, given.step.outputs, given.step.tree)
    assert {name: step.avals()[name] for name in step.outputs} == {
        name: given.step.avals()[name] for name in step.outputs
    }
    for name in ANYWHERE:
        check(schedule(step, orchestrations.NAMED[name]))
    for one in ascend.TABLE.passes:
        assert one(step) == step


@pytest.mark.parametrize(
    ("name", "of"),
    mostly_soak(
        itertools.product(["reference", "cpu"], STEPS),
        [*itertools.product(["cpu"], STEPS), ("reference", "8 bits"), ("reference", WHOLE)],
    ),
)
def test_other_backends_run_it_by_its_definitions(name, of):
    """Bit for bit, on the hostile machine too."""
    given = setup("bf16", **STEPS[of])

    def found(step: Step, seed: int | None = None) -> list:
        backend = backends.get(name, ranks=2, adversary=seed)
        assert not {fusion.op for fusion in fused.ALL} & set(backend.table.rules)
        run = given.compiled(backend, schedule(step, orchestrations.attention_aside))
        return pytree.tree_leaves(run(*backend.put(given.arguments(), copy=True)))

    expected, step = found(given.step), lowered(given)
    for seed in (None, 0, 1):
        assert equal(found(step, seed), expected), f"seed {seed}"


@pytest.mark.parametrize(
    ("release", "of"),
    mostly_soak(
        itertools.product(RELEASES, STEPS),
        [*itertools.product([NEWEST], STEPS), *itertools.product(RELEASES, ["8 bits"]), ("8.5", WHOLE), ("9.0", WHOLE)],
    ),
    indirect=["release"],
)
def test_near_the_same_on_every_release(release, of):
    """By the operators, against the parts by theirs, on one device: roundings apart."""
    given, backend = setup("bf16", **STEPS[of]), on_ascend(2)
    apart = leaves(backend, schedule(given.step, orchestrations.attention_aside), given)
    whole = leaves(backend, schedule(backend.lower(given.step), orchestrations.attention_aside), given)
    for ours, theirs in zip(whole, apart, strict=True):
        assert (ours.double() - theirs.double()).abs().max() <= 2**-6 * max(1, theirs.abs().max())
