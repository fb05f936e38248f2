"""What programs become on streams, held against a device module that only writes down what it is asked."""

import re
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen

from mla_fx.backends import Collective, Device, Run, RunError, device
from mla_fx.backends.device import Scratch
from mla_fx.backends.staging import Staging
from mla_fx.effects import Aval, Drop, Group, Input, InputError, Keep, Launch, Op, Program, Record, Stage, Wait
from tests.backends.standin import Machine, Stream

SHAPE = Aval((2,), "fp32")


@frozen
class Toy(Op):
    """`x` [D] -> [D], with a scratch."""

    operands: ClassVar = {"x": "D"}
    uses: ClassVar = ("pad",)

    def shape_rule(self, axes: Any, dtype: str) -> tuple[Aval, ...]:
        return (Aval((axes["D"],), dtype),)


@frozen
class Gather(Op):
    """`x` [D] -> [W, D] of all ranks."""

    group: Group
    operands: ClassVar = {"x": "D"}
    communicates: ClassVar = "all_gather"

    def shape_rule(self, axes: Any, dtype: str) -> tuple[Aval, ...]:
        return (Aval((self.group.size, axes["D"]), dtype),)


@frozen
class Count(Op):
    """`x` int64 [D] -> [D]."""

    operands: ClassVar = {"x": "D int64"}

    def shape_rule(self, axes: Any, dtype: str) -> tuple[Aval, ...]:
        return (Aval((axes["D"],), "int64"),)


class Toys:
    """Rules that log the stream they run on, what they make, and its end."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.count, self.runs = machine, 0, list[Run]()
        self.table = {Toy: self.toy, Gather: Collective(self.send, self.receive), Count: self.counted}

    def made(self, tensor: torch.Tensor, what: str) -> tuple[torch.Tensor]:
        name = f"v{self.count}"
        self.count += 1
        self.machine.labels[id(tensor)] = name
        weakref.finalize(tensor, self.machine.say, "free", name)
        self.machine.say("launch", f"{name} = {what}", self.machine.module.current)
        return (tensor,)

    def toy(self, x: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
        self.runs.append(run)
        return self.made(x + 1, "toy")

    def counted(self, x: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
        return self.made(x + 1, "count")

    def send(self, x: torch.Tensor, *, run: Run, group: Group) -> torch.Tensor:
        self.machine.say("launch", f"send {run.rank}", self.machine.module.current)
        return x

    def receive(self, moved: torch.Tensor, x: torch.Tensor, *, run: Run, group: Group) -> tuple[torch.Tensor]:
        return self.made(moved, f"receive {run.rank}")


CROSSING = (
    Launch("main", Toy(), ("x",), ("a",)),
    Record("main", "ready"),
    Wait("side", "ready"),
    Launch("side", Toy(), ("a",), ("b",)),
    Keep("a", "side"),
    Drop("a"),
    Record("side", "done"),
    Wait("main", "done"),
    Launch("main", Toy(), ("x",), ("c",)),
)
PROGRAM = Program((Input("x", SHAPE),), ("b", "c"), CROSSING)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def compiled(machine: Machine, program: Program = PROGRAM, ranks: int = 1) -> Any:
    """A function without arguments, and what it is made of."""
    toys = Toys(machine)
    run = machine.backend(ranks, toys.table).compile(program)
    call = lambda: run([torch.ones(2) for _ in range(ranks)])  # noqa: E731
    return call, run, toys


# --- effects -------------------------------------------------------------------------


def test_every_effect_is_the_call_that_it_names(machine):
    """In the first run, which looks at what the rules give, and in the others."""
    call, *_ = compiled(machine)
    for v in (0, 3, 6):
        assert machine.told(call) == [
            f"v{v} = toy on caller",
            "ready at caller",
            "side waits ready",
            "on side",
            f"v{v + 1} = toy on side",
            f"keep v{v} for side",
            f"free v{v}",
            "done at side",
            "caller waits done",
            "on caller",
            f"v{v + 2} = toy on caller",
            "on caller",
        ]


def test_ranks_share_streams_and_events(machine):
    """Records and waits are issued once for all ranks; launches, keeps and drops for each."""
    call, _, toys = compiled(machine, ranks=3)
    told = machine.told(call)
    assert told == [
        *(f"v{rank} = toy on caller" for rank in range(3)),
        "ready at caller",
        "side waits ready",
        "on side",
        *(f"v{rank} = toy on side" for rank in range(3, 6)),
        *(f"keep v{rank} for side" for rank in range(3)),
        *(f"free v{rank}" for rank in range(3)),
        "done at side",
        "caller waits done",
        "on caller",
        *(f"v{rank} = toy on caller" for rank in range(6, 9)),
        "on caller",
    ]
    assert (machine.module.made, machine.module.events) == (1, 2)
    assert [run.rank for run in toys.runs] == [0, 1, 2] * 3


def test_a_collective_is_one_launch_for_all_ranks(machine):
    program = Program((Input("x", SHAPE),), ("y",), (Launch("main", Gather(Group("dcp", 2)), ("x",), ("y",)),))
    call, run, _ = compiled(machine, program, ranks=2)
    sent = ["send 0 on caller", "send 1 on caller"]
    assert machine.told(call) == [*sent, "v0 = receive 0 on caller", "v1 = receive 1 on caller", "on caller"]
    ((first, second),) = run([torch.zeros(2), torch.ones(2)])
    assert first.tolist() == second.tolist() == [[0, 0], [1, 1]] and first.data_ptr() != second.data_ptr()


def test_executables_share_the_devices_streams_events_and_scratch(machine):
    first, _, toys = compiled(machine)
    second, _, others = compiled(machine, ranks=2)
    machine.told(first)
    assert [line for line in machine.told(second) if line.startswith("on")] == ["on side", "on caller", "on caller"]
    assert (machine.module.made, machine.module.events) == (1, 2)
    pads = [[run.scratch("pad") for run in of.runs] for of in (toys, others)]
    assert len({id(pad) for pad in pads[0]}) == 1 and {id(pad) for pad in pads[1][::2]} == {id(pads[0][0])}
    assert len({id(pad) for of in pads for pad in of}) == 2  # one a rank
    assert toys.runs[0].scratch("other") is not pads[0][0]


# --- the caller's stream ---------------------------------------------------------------


def test_main_is_the_callers_stream_whichever_that_is(machine):
    """One that comes on another stream is behind the last program, which came on the old one; once."""
    call, *_ = compiled(machine)
    machine.told(call)
    mine = machine.module.current = Stream(machine.module, 77)
    told = machine.told(call)
    assert told[:3] == ["stream 77 follows caller", "v3 = toy on stream 77", "ready at stream 77"]
    assert told[-1] == "on stream 77" and machine.module.current is mine
    machine.module.current = Stream(machine.module, 77)  # another handle of the same
    assert machine.told(call)[0] == "v6 = toy on stream 77"
    machine.module.current = machine.caller
    assert machine.told(call)[0] == "caller follows stream 77"


def test_a_caller_on_a_stream_of_the_program_is_refused(machine):
    call, *_ = compiled(machine)
    for _ in range(2):
        machine.module.current = Stream(machine.module, machine.device.streams["side"].stream_id)
        with pytest.raises(InputError, match=r"the caller's stream must not be a stream of the program beside main"):
            call()
        machine.module.current = machine.caller
        assert machine.told(call)[-1] == "on caller"


def test_two_names_with_one_handle_are_refused(machine):
    machine.module.pool = 1
    compiled(machine)
    other = Program((Input("x", SHAPE),), ("a",), ON_ANOTHER)
    with pytest.raises(InputError, match=r"streams: other must have a stream of the device of its own: got .* side"):
        compiled(machine, other)
    assert list(machine.device.streams) == ["side"]


ON_ANOTHER = (
    Record("main", "begin"),
    Wait("other", "begin"),
    Launch("other", Toy(), ("x",), ("a",)),
    Record("other", "end"),
    Wait("main", "end"),
)


def test_a_second_thread_is_refused(machine):
    """While the first is issuing; afterwards any thread may."""
    toys, errors = Toys(machine), list[BaseException]()
    real = toys.toy

    def meanwhile(x: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
        if not errors:
            thread = threading.Thread(target=attempt)
            thread.start()
            thread.join()
        return real(x, run=run)

    def attempt() -> None:
        try:
            run([torch.ones(2)])
        except InputError as error:
            errors.append(error)

    run = machine.backend(1, {**toys.table, Toy: meanwhile}).compile(PROGRAM)
    run([torch.ones(2)])
    assert [str(error) for error in errors] == [
        "a program on cpu must be called by one thread at a time: got a second one"
    ]
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert len(errors) == 1 and toys.count == 6


def test_after_an_error_the_device_is_waited_for_and_usable(machine):
    toys, calls = Toys(machine), []

    def fails_once(x: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("no")
        return toys.toy(x, run=run)

    run = machine.backend(1, {**toys.table, Toy: fails_once}).compile(PROGRAM)
    with pytest.raises(RunError, match=r"'b = toy a    uses pad' on stream side, rank 0: ZeroDivisionError: no"):
        machine.told(lambda: run([torch.ones(2)]))
    told = machine.told_so_far()
    assert told[told.index("synchronize") :][:2] == ["synchronize", "on caller"]
    assert "free v0" not in told[: told.index("synchronize")]  # what runs may be reading it
    assert machine.module.current is machine.caller
    (b,), (c,) = run([torch.ones(2)])
    assert b.tolist() == [3, 3] and c.tolist() == [2, 2]


def test_tensors_elsewhere_are_refused_before_anything_is_issued(machine):
    _, run, _ = compiled(machine)
    machine.module.log.clear()
    with pytest.raises(InputError, match=r"x of rank 0: must be on cpu, as Backend.put moves it: got meta"):
        run([torch.ones(2, device="meta")])
    assert machine.module.log == []


# --- what is staged --------------------------------------------------------------------

INTEGERS = Aval((3,), "int64")
STAGED = Program(
    (Input("n", INTEGERS, "staged"), Input("m", INTEGERS, "staged")),
    ("a", "b", "n"),
    (Stage(("n", "m")), Launch("main", Count(), ("n",), ("a",)), Launch("main", Count(), ("m",), ("b",))),
)


def test_integers_are_sent_together_and_once(machine):
    """One copy for all values of all ranks, with the event of its buffer; an output that was staged is the caller's."""
    run = machine.backend(2, Toys(machine).table).compile(STAGED)
    n, m = ([torch.arange(3) + 10 * k + rank for rank in range(2)] for k in range(2))
    told = machine.told(lambda: run(n, m))
    assert told[0] == "sent at caller" and "sent" not in " ".join(told[1:]) and len(told) == 6
    a, b, given = run(n, m)
    assert [x.tolist() for x in (*a, *b)] == [(x + 1).tolist() for x in (*n, *m)]
    assert all(mine is theirs for mine, theirs in zip(given, n, strict=True))


def sender(machine: Machine) -> Staging:
    machine.device.enter(())
    return Staging.of([INTEGERS, Aval((2, 2), "int32")], machine.device)


def test_buffers_are_two_in_turn(machine):
    """A host that is two steps ahead waits for the copy out of the buffer that it fills next."""
    staging = sender(machine)
    values = torch.arange(3), torch.ones(2, 2, dtype=torch.int32)
    log = [machine.told(lambda: staging.send(*values)) for _ in range(4)]
    assert log == [["sent at caller"]] * 2 + [["host waits sent", "sent at caller"]] * 2
    first, second = staging.events
    machine.module.log.clear()
    for _ in range(4):
        staging.send(*values)
    waited = [entry[1] for entry in machine.module.log if entry[0] == "host"]
    assert waited == [first, second, first, second]
    assert staging.pinned[0].data_ptr() != staging.pinned[1].data_ptr()


def test_what_is_sent_is_a_copy(machine):
    """The caller may refill his own at once; on the device there is one buffer, the same for every step."""
    staging = sender(machine)
    mine = torch.arange(3)
    n, table = staging.send(mine, torch.ones(2, 2, dtype=torch.int32).t())
    mine.zero_()
    assert n.tolist() == [0, 1, 2] and table.tolist() == [[1, 1], [1, 1]] and table.data_ptr() % 4 == 0
    again, _ = staging.send(torch.tensor([7, 8, 9]), torch.ones(2, 2, dtype=torch.int32))
    assert again is n and n.tolist() == [7, 8, 9]


def test_a_buffer_is_of_the_memory_of_the_stream_that_sends(machine):
    """Freed, it is then behind its last use; a caller that comes on another stream gets another buffer."""
    staging = sender(machine)
    values = torch.arange(3), torch.ones(2, 2, dtype=torch.int32)
    old = staging.send(*values)
    machine.device.leave(machine.caller)
    machine.module.current = Stream(machine.module, 77)
    machine.device.enter(())
    new = staging.send(*values)
    assert new[0].data_ptr() != old[0].data_ptr() and staging.send(*values)[0] is new[0]


# --- what a device holds ---------------------------------------------------------------


def test_scratch_is_the_largest_that_was_asked_for():
    scratch, asked = Scratch(Device("cpu")), []

    def need(size: int) -> int:
        asked.append(size)
        return size

    sizes = [scratch.room(size, lambda size=size: need(size)).nbytes for size in (4, 9, 4, 9, 2)]
    assert sizes == [4, 9, 9, 9, 9] and asked == [4, 9, 2]


def test_scratch_that_grows_waits_for_what_may_be_using_the_old():
    """And for nothing else: what is large enough is handed out at once."""
    waits: list[int] = []
    scratch = Scratch(Device("cpu", SimpleNamespace(synchronize=lambda: waits.append(before() is not None))))
    before, counts = weakref.ref(scratch.room("a", lambda: 4)), []
    for need, size in (("b", 3), ("c", 9), ("b", 3), ("d", 9)):
        scratch.room(need, lambda size=size: size)
        counts.append(len(waits))
    assert counts == [0, 1, 1, 1] and waits == [True] and before() is None


@pytest.mark.parametrize("kind", ["npu", "cuda"])
@pytest.mark.parametrize(
    ("told", "count", "in_sight", "taken"),
    [
        (None, 8, None, []),
        ("3", 8, None, [3]),
        ("0", 1, None, [0]),
        ("3", 1, "3", []),  # the one that it was given sight of
        ("3", 1, None, "LOCAL_RANK: must be below the number of {} devices in sight, 1: got 3"),
        ("3", 2, "0,1", "LOCAL_RANK: must be below the number of {} devices in sight, 2: got 3"),
        ("-1", 8, None, "LOCAL_RANK: must be the number of a process on its machine, from 0: got '-1'"),
    ],
)
def test_the_device_of_a_process(monkeypatch, kind, told, count, in_sight, taken):
    set_to: list[int] = []
    module = SimpleNamespace(device_count=lambda: count, set_device=set_to.append)
    monkeypatch.setattr(torch, "get_device_module", lambda asked: module)
    monkeypatch.setattr(sys.modules[Device.__module__], "_OWNED", {})
    variable = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}[kind]
    for name, value in (("LOCAL_RANK", told), (variable, in_sight)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if isinstance(taken, str):
        with pytest.raises(InputError, match=re.escape(taken.format(kind))):
            device(kind)
        return
    assert device(kind) is device(kind) and set_to == taken  # once


def test_constants_are_made_once():
    device, made = Device("cpu"), []
    for key in ("a", "b", "a"):
        run = Run(0, device)
        run.constant(key, lambda key=key: made.append(key) or torch.ones(1))
    assert made == ["a", "b"] and Run(1, device).constant("a", torch.empty) is device.constants["a"]
