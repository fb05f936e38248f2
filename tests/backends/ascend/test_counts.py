"""What one layer's attention costs on the device, counted on its trace: before, the hand-kept order, and ours.

The table in the README of the backends is what this test finds.  The three give
the same numbers (`test_same_results`).  Counted is all that a step of two ranks
in one process gives to the device, whatever it is for:

    operators   launches of operators
    copies      operators that only move or cast a tensor, and copies by the runtime
    events      records and waits, that of the buffer which the integers are sent from among them
    kept        tensors kept alive by record_stream
"""

import re

import pytest
import torch
from attrs import frozen

from mla_fx import orchestrations
from mla_fx.backends import Backend
from mla_fx.backends.ascend.emulator.releases import NEWEST
from mla_fx.effects import Program, check, schedule
from tests.backends.ascend import before
from tests.backends.ascend.steps import ascend, leaves, setup
from tests.test_imports import ROOT

MOVES = {"aclnnCast", "aclnnInplaceCopy", "aclnnCat", "aclnnStack"}
GIVEN = setup("bf16", ranks=2)


@frozen
class Counts:
    operators: int
    copies: int
    events: int
    kept: int


def ways() -> dict[str, tuple[Backend, Program]]:
    aside, backend = orchestrations.attention_aside, ascend(2)
    step = backend.lower(GIVEN.step)
    return {
        "exchange aside, float32 copies": (
            backend.with_rules(before.RULES),
            schedule(before.step(GIVEN), before.exchange_aside, mode="conservative"),
        ),
        "attention aside, all kept": (backend, schedule(step, aside, mode="conservative")),
        "attention aside, minimal": (backend, schedule(step, aside)),
    }


def counted(emulator, monkeypatch, backend: Backend, program: Program) -> Counts:
    """Of both ranks; a first step has made constants and workspaces."""
    run = GIVEN.compiled(backend, program)
    run(*backend.put(GIVEN.arguments(), copy=True))
    arguments = backend.put(GIVEN.arguments(), copy=True)
    kept, keep = [], torch.Tensor.record_stream
    with monkeypatch.context() as patch, emulator.tracing() as trace:
        patch.setattr(torch.Tensor, "record_stream", lambda x, stream: kept.append(x.shape) or keep(x, stream))
        run(*arguments)
    kinds = [task.kind for task in trace]
    assert set(kinds) <= {"operator", "record", "wait", "to_device", "on_device"}
    return Counts(
        operators=kinds.count("operator"),
        copies=sum(task.kind in ("to_device", "on_device") or task.name in MOVES for task in trace),
        events=kinds.count("record") + kinds.count("wait"),
        kept=len(kept),
    )


@pytest.mark.usefixtures("emulator")
def test_same_results():
    found = []
    for backend, program in ways().values():
        check(program)
        found.append(leaves(backend, program, GIVEN))
    for other in found[:2]:
        for ours, theirs in zip(found[2], other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0.03)
    assert all(map(torch.equal, found[1], found[2]))


@pytest.mark.cann(NEWEST)
def test_ours_is_lowest_in_every_column(emulator, monkeypatch):
    counts = {name: counted(emulator, monkeypatch, *way) for name, way in ways().items()}
    readme = (ROOT / "backends" / "README.md").read_text()
    table = {
        name: Counts(*map(int, numbers.split(" | ")))
        for name, numbers in re.findall(r"^\| (\w[^|]*?) \| (\d+ \| \d+ \| \d+ \| \d+) \|$", readme, re.MULTILINE)
        if name in counts
    }
    assert table == counts
    first, hand, ours = counts.values()
    for column in ("operators", "copies", "events", "kept"):
        assert getattr(ours, column) <= min(getattr(first, column), getattr(hand, column)), column
    assert ours.operators < first.operators and ours.copies < first.copies
    assert ours.kept == 0 < min(first.kept, hand.kept)
