"""What reached the device, as the emulator's trace has it: order, streams, events, and no cast on the way."""

import itertools
from collections import Counter

import pytest

from mla_fx import orchestrations
from mla_fx.backends.ascend.emulator import Traced
from mla_fx.effects import Record, Stage, Wait, schedule
from tests.backends.ascend.steps import ascend, events, setup, streams
from tests.cases import mostly_soak

FIA, UPDATE, STACK = "aclnnFusedInferAttentionScoreV4", "aclnnAttentionUpdate", "aclnnStack"
V_UP = ("aclnnTransposeBatchMatMul", "aclnnBatchMatMul")  # the second on 8.5, for sizes this small


def traced(emulator, dtype, ranks, orchestration, seed, layers=None):
    """The trace of one step, and the backend it ran on; a first step has made constants and workspaces."""
    emulator.seed(seed)
    given, backend = setup(dtype, ranks=ranks, layers=layers), ascend(ranks)
    run = given.compiled(backend, schedule(backend.lower(given.step), orchestrations.NAMED[orchestration]))
    run(*backend.put(given.arguments(), copy=True))
    arguments = backend.put(given.arguments(), copy=True)
    with emulator.tracing() as trace:
        run(*arguments)
    return trace, backend


def of(trace: list[Traced], backend) -> list[tuple[str, str]]:
    """(stream, what): the operators that the order is about, and all events but that of the buffer sent from."""
    on, named = streams(backend), events(backend)
    found = []
    for task in trace:
        if task.kind in ("record", "wait") and task.event in named:
            found.append((on[task.stream], f"{task.kind} {named[task.event]}"))
        elif task.name in (FIA, UPDATE, STACK):
            found.append((on[task.stream], task.name))
    return found


@pytest.mark.parametrize(
    ("dtype", "ranks", "seed"),
    mostly_soak(
        itertools.product(["bf16", "fp16"], [1, 2, 4], range(6)),
        [*[("bf16", 2, seed) for seed in range(4)], ("fp16", 1, 4), ("fp16", 4, 5)],
    ),
)
def test_attention_aside(emulator, dtype, ranks, seed):
    """History, record | wait, current, record | pack and exchange, join, combine: whatever the interleaving.

    The ranks of one process share streams and events, and go one after the other from launch to launch.
    """
    trace, backend = traced(emulator, dtype, ranks, "attention-aside", seed)
    tasks = of(trace, backend)
    gathered = [STACK] * ranks  # the queries of all heads, before the history
    expected = [*gathered, *[FIA] * ranks, "record e0", *[STACK] * ranks, "wait e1", *[UPDATE] * ranks]
    assert [what for stream, what in tasks if stream == "main"] == expected
    assert [what for stream, what in tasks if stream == "side"] == ["wait e0", *[FIA] * ranks, "record e1"]
    at = {task: position for position, task in enumerate(tasks)}  # the last of several
    assert at["main", "record e0"] < at["side", "wait e0"] < tasks.index(("side", FIA))
    assert at["side", FIA] < at["side", "record e1"] < at["main", "wait e1"] < tasks.index(("main", UPDATE))


def test_nothing_else_reaches_the_device(emulator):
    """Every record, wait and copy is an effect of the program, or the one copy of the integers with its event."""
    given, backend = setup("bf16"), ascend(2)
    program = schedule(backend.lower(given.step), orchestrations.attention_aside)
    trace, _ = traced(emulator, "bf16", 2, "attention-aside", 3)
    found = Counter(task.kind for task in trace if task.kind != "operator")
    assert found == {
        "to_device": program.count(Stage),
        "record": program.count(Record) + program.count(Stage),
        "wait": program.count(Wait),
    }
    assert {streams(backend)[task.stream] for task in trace} == set(program.streams)


def test_attention_and_exchange_overlap(emulator):
    """What the orchestration is for: under some seeds the exchange comes first, under others current attention."""
    first: set[tuple[str, str]] = set()
    for seed in range(100):  # about one in four starts the exchange first; which depends on the streams there are
        trace, backend = traced(emulator, "bf16", 1, "attention-aside", seed)
        tasks = of(trace, backend)
        behind = tasks[tasks.index(("main", FIA)) :]
        first.add(next(task for task in behind if task in (("side", FIA), ("main", STACK))))
        if len(first) == 2:
            return
    pytest.fail(f"under 100 seeds only {first} came first")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_no_cast_between_attention_and_projection(emulator, dtype):
    """Payload and partials keep the activation dtype; the angles and the sum over ranks are elsewhere."""
    trace, _ = traced(emulator, dtype, 2, "attention-aside", 1)
    names = [task for task in trace if task.kind == "operator"]
    first = next(k for k, task in enumerate(names) if task.name == FIA)
    last = max(k for k, task in enumerate(names) if task.name in V_UP)
    between = names[first : last + 1]
    assert sum(task.name == FIA for task in between) == 4
    assert not [task for task in between if task.casts or task.name == "aclnnCast"]
    assert any(task.casts for task in names)  # the trace can see one: the rotation is in float32


def test_no_cast_at_all_in_float32(emulator):
    trace, _ = traced(emulator, "fp32", 2, "attention-aside", 1)
    assert sum(task.name == "aclnnLogSumExp" for task in trace) >= 2  # both parts of the attention, by plain operators
    assert not [task for task in trace if task.casts or task.name == "aclnnCast"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_exchange_moves_bits(emulator, ranks):
    """The payload goes from rank to rank as integers."""
    trace, _ = traced(emulator, "bf16", ranks, "attention-aside", 0)
    moved = [task for task in trace if task.name == STACK]
    assert len(moved) == 2 * ranks
    own = 8 // ranks
    queries, payloads = [(3, own, 576)] * ranks, [(3 * own * 514,)] * ranks
    for task, shape in zip(moved, queries + payloads, strict=True):
        assert {str(dtype) for dtype, _ in (*task.operands, *task.results)} == {"torch.int16"}
        assert len(task.operands) == ranks and task.results[0][1] == (ranks, *shape)


def test_host_waits_for_nothing(emulator):
    """A step is issued without a synchronisation: nothing has run when the call returns."""
    emulator.seed(0)
    given, backend = setup("bf16"), ascend(2)
    run = given.compiled(backend, schedule(given.step, orchestrations.attention_aside))
    run(*backend.put(given.arguments(), copy=True))
    arguments = backend.put(given.arguments(), copy=True)
    emulator.synchronize()
    with emulator.tracing() as trace:
        run(*arguments)
        assert emulator.ran() == 0
    assert len(trace) > 100
