"""The attention of a layer in launches, one process per device: the table in the README is what is counted here.

Of rank 0 of two, bf16, DeepSeek-V3's head, two requests with one and two tokens; from its first product on, since
what comes before is once a step and not once a layer.  Nothing is filtered: operators are calls, kernels are what
they launch with strided operands made contiguous first.
"""

import re

import pytest
from attrs import evolve

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
def found(processes: Nursery, pytestconfig: pytest.Config) -> dict[str, Counts]:
    """On the newest release, of which the table is."""
    if (cann := pytestconfig.getoption("--cann")) != NEWEST:
        pytest.skip(f"the run is on {cann}")
    rows = {name: row for name, row in ROWS.items() if row[1] != "kernels" or why_not() is None}
    both = {name: processes.run(counting.counted, ranks=2, given=given, how=how) for name, (given, how) in rows.items()}
    assert all(of_rank == of_ranks[0] for of_ranks in both.values() for of_rank in of_ranks)
    return {name: of_ranks[0] for name, of_ranks in both.items()}


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


def test_pack_and_combine_are_one_launch_each(processes, found):
    """The local part is read where the attention left it; the operators of the fallback take one more."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    for name in ("fused", "fused, rounded angles, replicated query"):
        assert found[f"{name}, kernels"].operators == found[name].operators - 1
    trace = processes.run(counting.traced, ranks=2, given=GIVEN, how="kernels")[0]
    names = [task.name for task in trace if task.kind in ("operator", "collective")]
    first = names.index(ATTENTION)
    assert names[first : first + 5] == [ATTENTION, ATTENTION, "pack", "all_to_all", "merge"]
