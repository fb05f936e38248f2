"""What programs become on streams, held against a device module that only writes down what it is asked."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import define, field, frozen

from mla_fx.backends import Backend
from mla_fx.backends.torch_streams import Scratch
from mla_fx.effects import Aval, Drop, Input, InputError, Keep, Launch, Op, Program, Record, Wait

SHAPE = Aval((2,), "fp32")


@frozen
class Step(Op):
    """`x` [D] -> [D], with a scratch."""

    operands = ("x",)
    uses = ("pad",)

    def shape_rule(self, x: Aval) -> tuple[Aval, ...]:
        return (x,)


@frozen
class Swap(Op):
    """`x` [D] -> [D] of the other rank."""

    operands = ("x",)
    communicates = "dcp"

    def shape_rule(self, x: Aval) -> tuple[Aval, ...]:
        return (x,)


@define(eq=False)
class Module:
    """A device module whose streams and events log their calls; streams are numbered as they are made."""

    log: list[str] = field(factory=list)
    made: int = 0
    events: int = 0
    current: Any = None

    def Stream(self) -> "_Stream":
        self.made += 1
        return _Stream(self, f"s{self.made - 1}")

    def Event(self) -> "_Event":
        self.events += 1
        return _Event(self, f"e{self.events - 1}")

    def current_stream(self) -> Any:
        return self.current

    def set_stream(self, stream: Any) -> None:
        self.current = stream
        self.log.append(f"on {stream.name}")

    def synchronize(self) -> None:
        self.log.append("synchronize")


@define(eq=False)
class _Stream:
    module: Module
    name: str

    def wait_event(self, event: Any) -> None:
        self.module.log.append(f"{self.name} waits {event.name}")


@define(eq=False)
class _Event:
    module: Module
    name: str

    def record(self, stream: Any) -> None:
        self.module.log.append(f"{self.name} at {stream.name}")


@define(eq=False)
class Value:
    """Stands for a tensor that a rule made."""

    module: Module
    name: str

    def record_stream(self, stream: Any) -> None:
        self.module.log.append(f"keep {self.name} for {stream.name}")

    def __del__(self) -> None:
        self.module.log.append(f"free {self.name}")


class Machine:
    """A backend of `ranks` ranks on the module, whose rules log where they run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        self.module, self.count, self.pads = Module(), 0, []
        self.module.current = _Stream(self.module, "caller")
        monkeypatch.setattr(torch, "get_device_module", lambda kind: self.module)
        self.backend = Backend("toy", {Step: self.step, Swap: self.swap}, ranks=ranks, device="cpu")

    def value(self) -> Value:
        self.count += 1
        return Value(self.module, f"v{self.count - 1}")

    def step(self, x: Any, *, pad: Scratch) -> tuple[Value]:
        self.pads.append(pad)
        made = self.value()
        self.module.log.append(f"{made.name} = step")
        return (made,)

    def swap(self, operands: list[tuple[Any]]) -> Iterator[tuple[Value] | None]:
        for _ in operands:
            self.module.log.append("prepare")
            yield None
        for _ in operands:
            made = self.value()
            self.module.log.append(f"{made.name} = swap")
            yield (made,)

    def run(self, effects: tuple[Any, ...], outputs: tuple[str, ...]) -> list[str]:
        program = Program((Input("x", SHAPE),), outputs, effects)
        run = self.backend.compile(program)
        got = run([torch.ones(2)] * self.backend.ranks)
        log = list(self.module.log)
        del got
        return log


CROSSING = (
    Launch("main", Step(), ("x",), ("a",)),
    Record("main", "ready"),
    Wait("side", "ready"),
    Launch("side", Step(), ("a",), ("b",)),
    Keep("a", "side"),
    Drop("a"),
    Record("side", "done"),
    Wait("main", "done"),
    Launch("main", Step(), ("x",), ("c",)),
)


def test_every_effect_is_the_call_that_it_names(monkeypatch):
    log = Machine(monkeypatch, 1).run(CROSSING, ("b", "c"))
    assert log == [
        "e0 at caller",
        "s0 waits e0",
        "on s0",
        "v0 = step",
        "e1 at s0",
        "s1 waits e1",
        "on s1",
        "v1 = step",
        "keep v0 for s1",
        "free v0",
        "e2 at s1",
        "s0 waits e2",
        "on s0",
        "v2 = step",
        "e3 at s0",
        "caller waits e3",
        "keep v1 for caller",
        "keep v2 for caller",
        "on caller",
    ]


def test_ranks_have_streams_events_and_scratch_of_their_own(monkeypatch):
    machine = Machine(monkeypatch, 3)
    log = machine.run(CROSSING, ("b", "c"))
    assert machine.module.made == 6
    assert len([line for line in log if line.endswith("= step")]) == 9
    assert len({line for line in log if line.endswith(" at s0")}) == 2  # ready, end
    assert len({id(pad) for pad in machine.pads}) == 3  # one a rank, for all its launches


def test_ranks_meet_round_a_collective(monkeypatch):
    """Before each round and behind the last, every rank's stream waits for all: through the first one's."""
    machine = Machine(monkeypatch, 3)
    log = machine.run((Launch("main", Swap(), ("x",), ("y",)),), ("y",))
    names = {name: f"e{k}" for k, name in enumerate(("start", "first", "second", "third"))}
    meeting = [
        f"{names['second']} at s1",
        f"s0 waits {names['second']}",
        f"{names['third']} at s2",
        f"s0 waits {names['third']}",
        f"{names['first']} at s0",
        f"s1 waits {names['first']}",
        f"s2 waits {names['first']}",
    ]
    rounds = [
        ["on s0", "prepare", "on s1", "prepare", "on s2", "prepare"],
        ["on s0", "v0 = swap", "on s1", "v1 = swap", "on s2", "v2 = swap"],
    ]
    start = ["e0 at caller", "s0 waits e0", "s1 waits e0", "s2 waits e0"]
    assert log[: len(start)] == start
    expected = [*meeting, *rounds[0], *meeting, *rounds[1], *meeting]
    assert log[len(start) : len(start) + len(expected)] == expected


def test_a_rank_alone_meets_nobody(monkeypatch):
    log = Machine(monkeypatch, 1).run((Launch("main", Swap(), ("x",), ("y",)),), ("y",))
    assert [line for line in log if " at s0" in line] == ["e2 at s0"]  # the end


def test_after_an_error_the_device_is_waited_for_and_the_stream_is_the_callers(monkeypatch):
    machine = Machine(monkeypatch, 1)

    def fails(x: Any, *, pad: Scratch) -> tuple[Value]:
        raise InputError("x: refused")

    machine.backend = machine.backend.with_rules({Step: fails})
    with pytest.raises(InputError, match="x: refused"):
        machine.run(CROSSING, ("b", "c"))
    assert machine.module.log[-2:] == ["synchronize", "on caller"]


def test_tensors_elsewhere_are_refused_before_anything_is_issued(monkeypatch):
    machine = Machine(monkeypatch, 1)
    run = machine.backend.compile(Program((Input("x", SHAPE),), ("b", "c"), CROSSING))
    with pytest.raises(InputError, match=r"x of rank 0: must be on cpu, as Backend.put moves it: got meta"):
        run([torch.ones(2, device="meta")])
    assert machine.module.log == []


def test_scratch_is_the_largest_that_was_asked_for():
    scratch, made = Scratch(), []

    def make(size: int) -> torch.Tensor:
        made.append(size)
        return torch.empty(size)

    sizes = [scratch.room(size, lambda size=size: make(size)).numel() for size in (4, 9, 4, 9, 2)]
    assert sizes == [4, 9, 9, 9, 9] and made == [4, 9, 2]
    assert [held.numel() for held in scratch.held] == [4, 9]  # the outgrown one may still be in use
