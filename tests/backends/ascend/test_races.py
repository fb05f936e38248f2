"""Every seed gives the same bits, and no Record, Wait or Keep can be left out: with the wheel's own allocator.

The memory of a dropped value is handed on by the wheel's caching allocator,
kept back by its `record_stream`; the emulated device does the rest.
"""

import gc
import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from mla_fx import orchestrations
from mla_fx.backends.ascend.emulator import emulate
from mla_fx.effects import Keep, Program, Record, Stage, Wait, check, schedule
from tests.backends.ascend.steps import Trial, ascend, equal, setup
from tests.backends.test_decode_races import late_write, write_aside
from tests.cases import mostly_soak
from tests.setups import ANYWHERE, Setup

SEEDS = 200
#: What orders launches; a `Keep` is about memory.
ORDERS = Record | Wait | Stage


def outcome(emulator, trial: Trial, seed: int) -> list[torch.Tensor] | None:
    """What a step gives under a seed; None when garbage made the device fault."""
    emulator.seed(seed)
    try:
        found = trial()
        torch.npu.synchronize()  # what nothing waits for runs too, and its faults are of this step
        return found
    except RuntimeError:
        emulator.recover()
        return None


def expectation(emulator, program: Program, given: Setup) -> list[torch.Tensor]:
    """What the program gives under the first seed, where it is right."""
    expected = outcome(emulator, Trial(ascend(given.ranks), program, given), 0)
    assert expected is not None and not any(t.isnan().any() for t in expected)
    return expected


def goes_wrong(emulator, program: Program, given: Setup, expected: list[torch.Tensor]) -> bool:
    """Whether the program differs under some seed."""
    trial = Trial(ascend(given.ranks), program, given)
    outcomes = (outcome(emulator, trial, seed) for seed in range(SEEDS))
    return any(got is None or not equal(got, expected) for got in outcomes)


@cache
def serial_bits(given: Setup) -> list[torch.Tensor]:
    return expectation(emulate(), schedule(given.step, orchestrations.serial), given)


LAYER, STACK = setup("bf16"), setup("fp32", ranks=4, layers=2)
#: A step of one layer costs an eighth of a stack's.
MANY = [
    pytest.param(LAYER, 10, id="layer"),
    pytest.param(LAYER, 200, marks=pytest.mark.soak, id="layer, 200 seeds"),
    pytest.param(STACK, 40, marks=pytest.mark.soak, id="stack, 40 seeds"),
]


def same_bits(emulator, given: Setup, program: Program, seeds: int) -> None:
    trial, expected = Trial(ascend(given.ranks), program, given), serial_bits(given)
    for seed in range(seeds):
        got = outcome(emulator, trial, seed)
        assert got is not None and equal(got, expected), f"seed {seed}"


@pytest.mark.parametrize(
    ("orchestration", "mode"),
    mostly_soak(
        itertools.product(ANYWHERE, ["minimal", "conservative"]),
        [*((name, "minimal") for name in ANYWHERE), ("attention-aside", "conservative")],
    ),
)
@pytest.mark.parametrize(("given", "seeds"), MANY)
def test_every_seed_gives_the_same_bits(emulator, given, orchestration, mode, seeds):
    same_bits(emulator, given, schedule(given.step, orchestrations.NAMED[orchestration], mode=mode), seeds)


def test_every_seed_gives_the_same_bits_of_a_stack(emulator):
    """A sample of the long run above."""
    same_bits(emulator, STACK, schedule(STACK.step, orchestrations.attention_aside), 3)


@pytest.mark.parametrize("given", [setup("bf16"), setup("fp16", ranks=1)], ids=["2 ranks", "1 rank"])
@pytest.mark.parametrize("orchestration", ["exchange-aside", "attention-aside"])
def test_no_order_can_be_left_out(emulator, given, orchestration):
    """The first event of attention-aside protects the workspace alone, which is one block for both operators."""
    program = schedule(given.step, orchestrations.NAMED[orchestration])
    assert sum(isinstance(effect, Record | Wait) for effect in program.effects) == 4
    nothing_can_be_left_out(emulator, program, given)


def fragments() -> list[torch.Tensor]:
    """All memory that lies free beside what other tests keep, so that a block that is let go is the next one taken."""
    gc.collect()
    blocks = [block for segment in torch.npu.memory_snapshot() for block in segment["blocks"]]
    free = [block["size"] for block in blocks if block["state"] == "inactive"]
    return [torch.empty(size, dtype=torch.uint8, device="npu") for size in free]


@pytest.mark.parametrize("kinds", [Keep, pytest.param(ORDERS, marks=pytest.mark.soak, id="orders")])
def test_no_keep_can_be_left_out(emulator, kinds):
    """The cache write goes on beside main, which lets go of the new rows: `record_stream` keeps their memory."""
    held = fragments()
    given = setup("fp32")  # whose sizes make the allocator hand both on
    program = schedule(late_write(given), write_aside)
    check(program)
    trial, expected = Trial(ascend(2), program, given), expectation(emulator, program, given)
    for seed in range(10):
        got = outcome(emulator, trial, seed)
        assert got is not None and equal(got, expected), f"seed {seed}"
    assert sum(isinstance(effect, Keep) for effect in program.effects) == 2
    nothing_can_be_left_out(emulator, program, given, kinds)
    del held


def nothing_can_be_left_out(emulator, program: Program, given: Setup, kinds: Any = ORDERS | Keep) -> None:
    expected = expectation(emulator, program, given)
    for index, effect in enumerate(program.effects):
        if isinstance(effect, kinds):
            assert goes_wrong(emulator, program.without(index), given, expected), f"without {effect}"


#: Lengths of two sequences, and whether they start over in so many steps.
STEPS = [pytest.param(24, (130, 120), id="24"), pytest.param(1000, (0, 0), marks=pytest.mark.soak, id="1000")]


@cache
def row_of_steps(orchestration: str, seed: int, steps: int, start: tuple[int, int]) -> list[torch.Tensor]:
    """Nothing is waited for between the steps; a sequence starts over when its blocks are full."""
    given, draw, done = setup("bf16", interleave=4), random.Random(5), start
    emulate(seed=seed)
    backend = ascend(given.ranks)
    run = given.compiled(backend, schedule(given.step, orchestrations.NAMED[orchestration]))
    caches, hidden = backend.put((given.caches(), given.hidden()), copy=True)
    outs, overs = [], 0
    for _ in range(steps):
        query = draw.choice([(1, 1), (1, 2), (2, 1), (0, 3), (3, 0), (1, 0)])
        overs += sum(n > 150 for n in done)
        done = tuple(0 if n > 150 else n for n in done)
        out, caches = run(caches, hidden, given.batches(done, query))
        outs.append(out[0])
        done = tuple(n + q for n, q in zip(done, query, strict=True))
    assert overs
    return [out.cpu() for out in (*outs, *pytree.tree_leaves(caches))]


@pytest.mark.parametrize(("steps", "start"), STEPS)
@pytest.mark.parametrize("orchestration", mostly_soak(["exchange-aside", "attention-aside"], ["attention-aside"]))
def test_step_after_step_with_changing_lengths(emulator, orchestration, steps, start):
    expected = row_of_steps("serial", 0, steps, start)
    assert not any(out.isnan().any() for out in expected)
    assert equal(row_of_steps(orchestration, 1 + steps, steps, start), expected)


def test_a_seed_replays(emulator):
    """What ranks do is on shared streams, so that a step leaves a seed few orders: some seeds have the same."""
    given = setup("bf16")
    program = schedule(given.step, orchestrations.attention_aside)
    run = given.compiled(ascend(2), program)
    arguments = ascend(2).put(given.arguments(), copy=True)
    run(*arguments)

    def order(seed: int) -> list[tuple[str, int, str]]:
        emulator.seed(seed)
        with emulator.tracing() as trace:
            run(*arguments)
        return [(task.kind, task.stream, task.name) for task in trace]

    first = [order(seed) for seed in range(6)]
    assert [order(seed) for seed in range(6)] == first
    assert len(set(map(tuple, first))) >= 4
