"""The named orchestrations on the emulated Ascend: the bits of the serial program of the same step, under its seeds."""

import pytest
import torch
from attrs import evolve

from mla_fx import backends, orchestrations
from mla_fx.effects import ops, schedule
from mla_fx.passes import prefetch_weights
from tests.backends.ascend.steps import Trial, ascend, equal, leaves, setup, streams
from tests.test_orchestrations import LENGTHS, NAMES, OF_ATTENTION, RANKS, serially

pytestmark = pytest.mark.usefixtures("emulator")


def of(name, dtype, **sizes):
    """A step that an orchestration is for, of sizes that the operators take."""
    sizes = {"layers": None if name in OF_ATTENTION else 2, "tokens": 4, **sizes}
    return setup(dtype, split=orchestrations.NAMED[name].split, **sizes)


def agree(emulator, name, given, seeds, **batch):
    """Of the step as the backend lowers it, which is how a model runs."""
    backend = ascend(given.ranks)
    step = backend.lower(given.step)
    expected = leaves(backend, serially(step, name), given, **batch)
    assert all(leaf.isfinite().all() for leaf in expected)
    trial = Trial(backend, schedule(step, orchestrations.NAMED[name]), given, **batch)
    for seed in seeds:
        emulator.seed(seed)
        assert equal(trial(), expected), f"seed {seed}"


@pytest.mark.parametrize(("name", "ranks"), list(zip(NAMES[2:], (2, 4, 2, 8), strict=True)))
def test_the_bits_are_those_of_the_serial_program(emulator, name, ranks):
    agree(emulator, name, of(name, "bf16", ranks=ranks), range(2))


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "form", [{}, {"replicate_query": True, "project_before_merge": True}, {"quantization": "w8a8"}]
)
def test_everywhere_the_bits_are_those_of_the_serial_program(emulator, name, ranks, dtype, form):
    for history, query in LENGTHS:
        given = of(name, dtype, ranks=ranks, layers=2, **form)
        given = evolve(given, config=evolve(given.config, v_head_dim=16))
        agree(emulator, name, given, range(4), history=history, query=query)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("form", ["replicate_query", "project_before_merge"])
def test_a_pass_against_the_reference(form, dtype):
    given = setup(dtype, ranks=2, **{form: True})
    given = evolve(given, config=evolve(given.config, v_head_dim=16))  # which is merged as values, in eights
    program = schedule(given.step, orchestrations.attention_aside)
    got = leaves(ascend(2), program, given)
    want = leaves(backends.get("reference", ranks=2), program, given)
    for ours, exactly in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), exactly, rtol=0, atol={"bf16": 0.06, "fp32": 2e-5}[dtype])


@pytest.mark.parametrize("form", [{}, {"replicate_query": True}])
def test_an_expanded_prompt_against_the_reference(emulator, form):
    """By the operator: one call over heads of 128 a rank, and the history's over the latent."""
    given = setup("bf16", ranks=2, tokens=8, project_before_merge=True, expand_current=True, **form)
    given = evolve(given, config=evolve(given.config, qk_nope_head_dim=128, v_head_dim=128))
    program = schedule(given.step, orchestrations.attention_aside)
    batch = {"history": (9, 5), "query": (5, 2)}
    with emulator.tracing() as trace:
        got = leaves(ascend(2), program, given, **batch)
    widths = [task.operands[0][1][2] for task in trace if task.name == "aclnnFusedInferAttentionScoreV4"]
    assert sorted(widths) == [128, 128, 512, 512]
    for ours, exactly in zip(got, leaves(backends.get("reference", ranks=2), program, given, **batch), strict=True):
        torch.testing.assert_close(ours.double(), exactly, rtol=0, atol=0.06)


def test_a_prefetch_reaches_the_device(emulator):
    """On its stream, each rank's weights whole, by npu_prefetch."""
    given = of("prefetch", "bf16")
    program, backend = schedule(given.step, orchestrations.prefetch), ascend(2)
    trial = Trial(backend, program, given)
    trial()
    with emulator.tracing() as trace:
        trial()
    step = prefetch_weights(given.step)
    sizes = [step.avals()[e.operands[0]].bytes_ for e in step.equations if isinstance(e.op, ops.Prefetch)]
    fetched = [task for task in trace if task.kind == "prefetch"]
    assert {streams(backend)[task.stream] for task in fetched} == {"prefetch"}
    assert sorted(task.bytes_ for task in fetched) == sorted(2 * sizes)
