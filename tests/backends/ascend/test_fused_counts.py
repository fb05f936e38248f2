"""The attention of a layer in launches, one process per device: the table in the README is what is counted here.

Of rank 0 of two, bf16, DeepSeek-V3's head, two requests with one and two tokens; from its first product on, since
what comes before is once a step and not once a layer.  Nothing is filtered: operators are calls, kernels are what
they launch with strided operands made contiguous first.
"""

import re

import pytest
from attrs import evolve

from mla_fx.backends.ascend.emulator import Traced
from mla_fx.backends.ascend.emulator.releases import NEWEST
from tests.backends.ascend import counting
from tests.backends.ascend.counting import CONFIG, Counts
from tests.backends.kernels.interpreter import why_not
from tests.processes import Nursery
from tests.setups import Setup
from tests.test_imports import ROOT

ATTENTION = "aclnnFusedInferAttentionScoreV4"
GIVEN = Setup(dtype="bf16", config=CONFIG, block_size=16)
ROWS = {
    "exchange aside, in float32 copies": (GIVEN, "before"),
    "attention aside, part by part": (GIVEN, "apart"),
    "fused": (GIVEN, "fused"),
    "fused, 8 bits": (evolve(GIVEN, quantization="w8a8"), "fused"),
    "fused, rounded angles": (evolve(GIVEN, round_angles=True), "fused"),
    "fused, rounded angles, replicated query": (evolve(GIVEN, round_angles=True, replicate_query=True), "fused"),
    "fused, kernels": (GIVEN, "kernels"),
    "fused, rounded angles, replicated query, kernels": (
        evolve(GIVEN, round_angles=True, replicate_query=True),
        "kernels",
    ),
}


@pytest.fixture(scope="module")
def traces(processes: Nursery, pytestconfig: pytest.Config) -> dict[str, list[Traced]]:
    """On the newest release, of which the table is; of all ranks the same is counted."""
    if (cann := pytestconfig.getoption("--cann")) != NEWEST:
        pytest.skip(f"the run is on {cann}")
    rows = {name: row for name, row in ROWS.items() if row[1] != "kernels" or why_not() is None}
    first, second = processes.run(counting.traced, ranks=2, rows=rows)
    assert all(counting.counts(first[name]) == counting.counts(second[name]) for name in rows)
    return first


@pytest.fixture(scope="module")
def found(traces: dict[str, list[Traced]]) -> dict[str, Counts]:
    return {name: counting.counts(trace) for name, trace in traces.items()}


def test_the_table_of_the_readme_is_what_is_counted(found):
    readme = (ROOT / "backends" / "README.md").read_text()
    rows = re.findall(r"^\| ([a-z][^|]*?) \| (\d+) \| (\d+) \| (\d+) \|$", readme, re.MULTILINE)
    assert {name: Counts(*map(int, numbers)) for name, *numbers in rows if name in found} == found


def test_what_is_promised(found):
    assert found["fused, rounded angles"].operators <= 18
    assert found["fused, rounded angles"].kernels <= 18
    assert found["fused, rounded angles"].collectives == 3
    assert found["fused, rounded angles, replicated query"].collectives == 2
    sixteen = [name for name in ROWS if "8 bits" not in name and "kernels" not in name]
    for better, worse in zip(sixteen[1:4], sixteen, strict=False):
        assert found[better].operators < found[worse].operators and found[better].kernels < found[worse].kernels


def test_pack_and_combine_are_one_launch_each(traces, found):
    """The local part is read where the attention left it; the operators of the fallback take one more."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    for name in ("fused", "fused, rounded angles, replicated query"):
        assert found[f"{name}, kernels"].operators == found[name].operators - 1
    names = [task.name for task in traces["fused, kernels"] if task.kind in ("operator", "collective")]
    first = names.index(ATTENTION)
    *others, last = names[first : first + 5]  # the seed says when the second attention runs, on its own stream
    assert sorted(others) == sorted([ATTENTION, ATTENTION, "pack", "all_to_all"]) and last == "merge"
    assert others.index("pack") < others.index("all_to_all")
