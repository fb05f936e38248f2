"""What the experts of one layer cost on the device: the operators of a rank, counted on its trace without a filter.

Counted is all from the hidden states on to a rank's part of the sum, with the gate of DeepSeek-V3.  The table in the
README of the backends is what this test finds; all ways give the same numbers.
"""

import re

import pytest
import torch

from mla_fx import backends
from mla_fx.effects import ops
from tests.backends.ascend.experts import Experts, Run, permuted_back
from tests.test_imports import ROOT

GIVEN = [Experts(quantization=kind, shared=shared) for shared in (0, 1) for kind in (None, "w8a8")]
WAYS = ("rows permuted back", "op by op", "lowered")


def ready(given: Experts, way: str) -> Run:
    backend = backends.get("ascend", ranks=given.ranks)
    if way == "rows permuted back":
        backend = backend.with_rules({ops.UnpermuteTokens: permuted_back})
    return Run(given, backend, backend.lower(given.step) if way == "lowered" else given.step)


def operators(emulator, given: Experts, way: str = "lowered") -> list[str]:
    """Of every rank of a process, one after the other; a first run has made constants."""
    run = ready(given, way)
    run()
    with emulator.tracing() as trace:
        run.program(run.x)
    assert {task.kind for task in trace} <= {"operator", "record", "wait"}
    return [task.name for task in trace if task.kind == "operator"]


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: f"{given.quantization}-{given.shared}")
def test_all_ways_give_the_same_numbers(emulator, given):
    found = [ready(given, way)() for way in WAYS]
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=want.abs().max().item() / 32)


@pytest.mark.cann("9.1")
@pytest.mark.parametrize("way", WAYS)
def test_the_table(emulator, way):
    """The same for each rank of a process, on the newest release."""
    readme = (ROOT / "backends" / "README.md").read_text()
    (line,) = re.findall(rf"^\| {way} \| ([\d |]+) \|$", readme, re.MULTILINE)
    counts = [len(operators(emulator, given, way)) for given in GIVEN]
    assert [count / GIVEN[0].ranks for count in counts] == [int(number) for number in line.split(" | ")]


def test_routed_experts_are_at_most_eight(emulator, release):
    """In 8 bits one less where weights are in FRACTAL_NZ."""
    counts = [len(operators(emulator, given)) // given.ranks for given in GIVEN[:2]]
    assert counts == [8, 7 if release == "9.1" else 8]


def test_the_sum_with_shared_experts_is_no_launch(emulator):
    for given in GIVEN[2:]:
        assert "aclnnAdd" not in operators(emulator, given)


def test_parameters_are_cast_once(emulator):
    """Of what a step casts nothing is a parameter: the one cast is that of the hidden states, for the gate."""
    for given in GIVEN[:2]:
        names = operators(emulator, given)
        assert names.count("aclnnInplaceCopy") == given.ranks and names[0] == "aclnnInplaceCopy"
