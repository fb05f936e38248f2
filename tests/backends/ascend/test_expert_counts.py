"""What the experts of one layer cost on the device: the operators of a rank, counted on its trace without a filter.

Counted is all from the hidden states on to a rank's part of the sum, with the gate of DeepSeek-V3.
"""

import pytest

from mla_fx import backends
from tests.backends.ascend.experts import Experts, Run


def operators(emulator, given: Experts) -> list[str]:
    """Of every rank of a process, one after the other; a first run has made constants."""
    backend = backends.get("ascend", ranks=given.ranks)
    run = Run(given, backend, backend.lower(given.step))
    run()
    with emulator.tracing() as trace:
        run.program(run.x)
    assert {task.kind for task in trace} <= {"operator", "record", "wait"}
    names = [task.name for task in trace if task.kind == "operator"]
    assert len(names) % given.ranks == 0
    return names


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("quantization", "most"), [(None, 8), ("w8a8", 8)], ids=["bf16", "W8A8"])
def test_routed_experts(emulator, ranks, quantization, most):
    names = operators(emulator, Experts(ranks=ranks, quantization=quantization))
    assert len(names) <= most * ranks, names


#: Before there were `npu_moe_finalize_routing` and fused ops: 19 and 23, and with shared experts 23 and 29.
@pytest.mark.parametrize(("quantization", "most"), [(None, 11), ("w8a8", 13)], ids=["bf16", "W8A8"])
def test_with_shared_experts(emulator, quantization, most):
    """Their sum with the routed ones is no launch of its own."""
    names = operators(emulator, Experts(ranks=1, quantization=quantization, shared=1))
    assert len(names) == most and "aclnnAdd" not in names


def test_parameters_are_cast_once(emulator):
    """Of what a step casts nothing is a parameter: the one cast is that of the hidden states, for the gate."""
    for quantization in (None, "w8a8"):
        given = Experts(ranks=1, quantization=quantization)
        names = operators(emulator, given)
        assert names.count("aclnnInplaceCopy") == 1 and names[0] == "aclnnInplaceCopy"
