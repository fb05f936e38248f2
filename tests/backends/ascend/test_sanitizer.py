"""A third judge beside law and machine: the stream sanitizer that comes with torch_npu, over the emulated CANN.

It traces a process of its own, `tests.backends.ascend.sanitized`.  One run of a program is enough for it: it compares
what events order, and need not see anything go wrong.
"""

from typing import Any

import pytest

from mla_fx import orchestrations
from mla_fx.effects import Keep, Record, Wait, schedule
from tests.backends.ascend import ranks as do
from tests.backends.ascend.steps import setup
from tests.backends.test_decode_races import late_write, write_aside


@pytest.mark.soak
def test_nothing_is_reported_of_legal_programs(processes):
    """Every named orchestration, for one to four ranks; two steps in a row."""
    (found,) = processes.run(do.sanitized, ranks=1, names=(), limit=1200)
    ways = [*(f"{ranks} ranks" for ranks in (1, 2, 3, 4)), "conservative"]
    assert set(found) == {f"{name}, {way}" for name in orchestrations.NAMED for way in ways}
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "asides",
    [
        {"attention-aside": "side", "late-write": "keys"},
        pytest.param({"exchange-aside": "comm"}, marks=pytest.mark.soak),
    ],
    ids=list,
)
def test_every_effect_that_is_left_out_is_named(processes, asides):
    """What is missing, and between which streams; where a program keeps memory, that keep; of the whole, nothing."""
    (told,) = processes.run(do.sanitized, ranks=1, names=tuple(asides), limit=600)
    for name, aside in asides.items():
        assert told.pop(name) == []
        each_is_named(name, aside, {case: found for case, found in told.items() if case.startswith(name)})


def each_is_named(name: str, aside: str, wanting: dict[str, Any]) -> None:
    program = schedule(late_write(setup("fp32")), write_aside) if name == "late-write" else None
    effects = program or schedule(setup("bf16").step, orchestrations.NAMED[name])
    asked = [effect for effect in effects if isinstance(effect, Record | Wait | Keep)]
    assert set(wanting) == {f"{name} without '{effect}'" for effect in asked} and len(asked) >= 4
    for case, found in wanting.items():
        kept = "'keep" in case
        what, *between = found[0] if found else [None]
        assert what == ("keep" if kept else "order"), case
        assert {*between} == {"main", aside}, case
        assert not kept or found == [("keep", "main", aside)], case
