"""What one layer's attention costs on the device, counted on its trace: before, the hand-kept order, and ours.

The README's table is what this test finds.  The three give the same numbers
(`test_same_results`); counted are, for each rank and step:

    operators   launches of operators
    copies      operators that only move or cast a tensor, and copies by the runtime
    events      records and waits of the program
    kept        tensors kept alive by record_stream
"""

import re

import pytest
import torch
from attrs import frozen

from mla_fx import orchestrations
from mla_fx.backends import Backend
from mla_fx.effects import Keep, Program, check, schedule
from tests.backends.ascend import before
from tests.backends.ascend.steps import ascend, body, leaves, setup
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
    step = GIVEN.step
    aside = orchestrations.attention_aside
    return {
        "exchange aside, float32 copies": (
            ascend(2).with_rules(before.RULES),
            schedule(before.step(GIVEN), before.exchange_aside, mode="conservative"),
        ),
        "attention aside, all kept": (ascend(2), schedule(step, aside, mode="conservative")),
        "attention aside, minimal": (ascend(2), schedule(step, aside)),
    }


def counted(emulator, backend: Backend, program: Program) -> Counts:
    """Of one rank; a first step has made constants and workspaces."""
    run = backend.compile(program)
    run(*backend.put(GIVEN.arguments(), copy=True))
    arguments = backend.put(GIVEN.arguments(), copy=True)
    with emulator.tracing() as trace:
        run(*arguments)
    streams = {stream.npu_stream for (rank, _), stream in body(run).streams.items() if rank == 0}
    events = {event.npu_event for (rank, name), event in body(run).events.items() if rank == 0 and name[0] != "<"}
    mine = [task for task in trace if task.stream in streams]
    return Counts(
        operators=sum(task.kind == "operator" for task in mine),
        copies=sum(task.kind == "on_device" or task.name in MOVES for task in mine),
        events=sum(task.kind in ("record", "wait") and task.event in events for task in mine),
        kept=program.count(Keep),
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


def test_ours_is_lowest_in_every_column(emulator):
    counts = {name: counted(emulator, *way) for name, way in ways().items()}
    readme = (ROOT / "README.md").read_text()
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
