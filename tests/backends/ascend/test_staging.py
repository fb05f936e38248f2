"""Integers of a step in flight: from buffers of the executable's own, whatever the caller does with his."""

from functools import cache
from typing import Any

import pytest
import torch

from mla_fx import orchestrations
from mla_fx.backends import device
from mla_fx.backends.ascend.emulator import emulate
from mla_fx.backends.staging import Staging
from mla_fx.effects import schedule
from tests.backends.ascend.steps import ascend, equal, leaves, setup

GIVEN = setup("fp32")
#: History and query lengths of steps that follow each other.
LENGTHS = [((0, 0), (1, 2)), ((1, 2), (3, 0)), ((4, 2), (0, 1)), ((4, 3), (1, 1)), ((5, 4), (2, 1)), ((7, 5), (1, 2))]


def pinned(batch: Any) -> Any:
    """The batch with its integers in memory that a device fetches by itself, so that a copy need not be waited for."""
    parts = {name: getattr(batch, name).pin_memory() for name in ("positions", "slots", "block_table")}
    assert all(part.is_pinned() for part in parts.values())
    return batch._replace(**parts)


def refill(batch: Any, other: Any) -> Any:
    """The batch with what `other` says, in the same memory."""
    for name in ("positions", "slots", "block_table"):
        getattr(batch, name).copy_(getattr(other, name))
    return batch._replace(query_lengths=other.query_lengths, history_lengths=other.history_lengths)


@cache
def wanted() -> list[torch.Tensor]:
    """Outputs of batches that are new in every step."""
    return outputs(emulate(), 0, refilled=False)


def outputs(emulator, seed: int, *, refilled: bool) -> list[torch.Tensor]:
    """Outputs of several steps without a wait between them; the batches are new in every step, or always the same."""
    emulator.seed(seed)
    backend = ascend(GIVEN.ranks)
    run = GIVEN.compiled(backend, schedule(GIVEN.step, orchestrations.attention_aside))
    caches, hidden = backend.put((GIVEN.caches(), GIVEN.hidden()), copy=True)
    batches, outs = [pinned(batch) for batch in GIVEN.batches(*LENGTHS[0])], []
    for lengths in LENGTHS:
        new = GIVEN.batches(*lengths)
        batches = [refill(mine, other) for mine, other in zip(batches, new, strict=True)] if refilled else new
        (out, *_), caches = run(caches, hidden, batches)
        outs.append(out)
    return [out.cpu() for out in outs]


def test_a_caller_may_refill_his_integers_at_once(emulator):
    for seed in range(3):
        assert equal(outputs(emulator, seed, refilled=True), wanted()), f"seed {seed}"


def from_the_callers(self: Staging, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(value.to("npu", non_blocking=True) for value in values)


def without_waiting(self: Staging, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    self.used = [False, False]
    return SEND(self, *values)


def from_one_buffer(self: Staging, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    self.turn, self.used = 0, [False, False]
    return SEND(self, *values)


SEND = Staging.send


@pytest.mark.parametrize("send", [from_the_callers, without_waiting, from_one_buffer])
def test_the_test_sees_integers_that_are_overwritten(emulator, monkeypatch, send):
    expected = wanted()
    monkeypatch.setattr(Staging, "send", send)

    def wrong(seed: int) -> bool:
        try:
            return not equal(outputs(emulator, seed, refilled=True), expected)
        except RuntimeError:  # garbage made the device fault
            emulator.recover()
            return True

    assert any(wrong(seed) for seed in range(12))


def test_a_step_sends_from_pinned_memory_in_one_copy(emulator):
    assert device("npu").pinned(8).is_pinned()
    backend = ascend(2)
    run = GIVEN.compiled(backend, schedule(GIVEN.step, orchestrations.serial))
    arguments = backend.put(GIVEN.arguments(), copy=True)
    run(*arguments)
    with emulator.tracing() as trace:
        run(*arguments)
    (copy,) = [task for task in trace if task.kind == "to_device"]
    values = 2 * [8 * GIVEN.tokens, 8 * GIVEN.tokens, 4 * GIVEN.requests * GIVEN.table_width]
    assert copy.bytes_ == sum(-(-size // 64) * 64 for size in values)
    assert copy.stream == torch.npu.current_stream().npu_stream


def test_a_caller_on_another_stream_is_behind_the_last_step(emulator):
    """Steps of one sequence from two streams in turn: caches, buffers and scratch are handed on in order."""
    program = schedule(GIVEN.step, orchestrations.attention_aside)
    expected = leaves(ascend(2), program, GIVEN)
    backend = ascend(2)
    run = GIVEN.compiled(backend, program)
    given = backend.put((GIVEN.caches(), GIVEN.hidden(), GIVEN.batches()))
    callers = [torch.npu.Stream(), torch.npu.Stream()]
    for seed in range(4):
        emulator.seed(seed)
        found = []
        for turn in range(4):
            with torch.npu.stream(callers[turn % 2]):
                caches = [type(cache)(*(part.clone() for part in cache)) for cache in given[0]]
                out, caches = run(caches, *given[1:])
                found.append([leaf + 0 for leaf in torch.utils._pytree.tree_leaves((out, caches))])
                del out, caches
        torch.npu.synchronize()
        assert all(equal([leaf.cpu() for leaf in of], expected) for of in found), f"seed {seed}"
