"""A third judge beside law and machine: the stream sanitizer that comes with torch_npu, over the emulated CANN.

`tests.backends.ascend.sanitized` runs it in one process for all cases.  One run of a program is enough for it: it
compares what events order, and need not see anything go wrong.
"""

import json
import os
import subprocess
import sys

import pytest

from mla_fx import orchestrations
from mla_fx.effects import Keep, Record, Wait, schedule
from tests.backends.ascend.conftest import why_not
from tests.backends.ascend.steps import setup
from tests.backends.test_decode_races import late_write, write_aside
from tests.test_imports import ROOT

Told = dict[str, list[list[str]]]


def asked(which: str) -> Told:
    """What the tool reports of `legal` or `wanting` programs, by case."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.backends.ascend.sanitized", which]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.fixture(scope="module")
def told() -> Told:
    return asked("wanting")


def test_nothing_is_reported_of_legal_programs(told):
    """Every named orchestration, and one that keeps memory; two steps in a row."""
    legal = {name: found for name, found in told.items() if " without " not in name}
    assert set(legal) == {*orchestrations.NAMED, "late-write"}
    assert {name: found for name, found in legal.items() if found} == {}


@pytest.mark.soak
def test_nothing_is_reported_for_one_to_four_ranks():
    found = asked("legal")
    ways = [*(f"{ranks} ranks" for ranks in (1, 2, 3, 4)), "conservative"]
    assert set(found) == {f"{name}, {way}" for name in orchestrations.NAMED for way in ways}
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    ("name", "aside"), [("exchange-aside", "comm"), ("attention-aside", "side"), ("late-write", "keys")]
)
def test_every_effect_that_is_left_out_is_named(told, name, aside):
    """What is missing, and between which streams; where a program keeps memory, that keep."""
    wanting = {case: found for case, found in told.items() if case.startswith(f"{name} without ")}
    program = schedule(late_write(setup("fp32")), write_aside) if name == "late-write" else None
    effects = program or schedule(setup("bf16").step, orchestrations.NAMED[name])
    asked = [effect for effect in effects if isinstance(effect, Record | Wait | Keep)]
    assert set(wanting) == {f"{name} without '{effect}'" for effect in asked} and len(asked) >= 4
    for case, found in wanting.items():
        kept = "'keep" in case
        first = found[0] if found else []
        assert first[:1] == ["keep" if kept else "order"], case
        assert {*first[1:]} == {"main", aside}, case
        assert not kept or found == [["keep", "main", aside]], case
