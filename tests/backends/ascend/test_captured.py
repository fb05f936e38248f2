"""Captured programs on the emulated CANN, through the wheel's own NPUGraph, task groups and external events."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from mla_fx import StepShape, backends, orchestrations
from mla_fx.backends.captured import UPDATE
from mla_fx.effects import InputError, schedule
from mla_fx.models import deepseek_v3_config, model_step
from tests.backends.ascend import ranks as do
from tests.backends.ascend.captured import GIVEN, Pair, batches, host
from tests.setups import ANYWHERE, Setup
from tests.test_imports import ROOT

ROWS = ("launch by launch", "captured, any lengths", "captured, a new token each")


def verify(emulator: Any, given: Setup, orchestration: str, steps: int, seed: int) -> None:
    pair, rng = Pair(given, orchestration), np.random.default_rng(seed)
    for number in range(steps):
        emulator.seed(1000 * seed + number)
        pair.same(number, batches(given, rng))


@pytest.mark.parametrize(
    ("ranks", "orchestration"), [(1, "attention-aside"), (2, "serial"), (2, "exchange-aside"), (4, "attention-aside")]
)
def test_captured_is_eager_bit_for_bit(emulator, ranks, orchestration):
    verify(emulator, evolve(GIVEN, ranks=ranks), orchestration, steps=5, seed=ranks)


@pytest.mark.parametrize("quantization", [None, "w8a8"])
def test_a_model_captured_is_eager_bit_for_bit(emulator, quantization):
    verify(emulator, evolve(GIVEN, layers=2, quantization=quantization), "attention-aside", steps=3, seed=3)


def test_part_by_part_and_with_other_forms(emulator):
    """Without fused ops, and with the passes that change what crosses the ranks."""
    for given, lower in ((GIVEN, False), (evolve(GIVEN, replicate_query=True, project_before_merge=True), True)):
        pair, rng = Pair(given, "attention-aside", lower=lower), np.random.default_rng(0)
        for number in range(3):
            pair.same(number, batches(given, rng))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
def test_captured_over_many_steps(emulator, seed):
    rng = np.random.default_rng(seed)
    layers, quantization = [(None, None), (2, None), (2, "w8a8")][seed % 3]
    given = evolve(
        GIVEN,
        ranks=int(rng.choice([1, 2, 4, 8])),
        layers=layers,
        quantization=quantization,
        interleave=int(rng.choice([1, 16])),
        round_angles=bool(rng.integers(2)),
    )
    verify(emulator, given, str(rng.choice(ANYWHERE)), steps=1000 if seed == 0 else 20, seed=seed)


def test_captured_and_eager_steps_mix(emulator):
    """Two sizes captured and one that is not, over the same caches, in any order."""
    backend, sizes = backends.get("ascend", ranks=2), (4, 2, 3)
    runs, caches, given = {}, backend.put(GIVEN.caches(), copy=True), {}
    fresh = backend.put(GIVEN.caches(), copy=True)
    for tokens in sizes:
        given[tokens] = evolve(GIVEN, tokens=tokens)
        program = schedule(backend.lower(given[tokens].step), orchestrations.attention_aside)
        prepared = backend.prepare(program, given[tokens].params())
        runs[tokens] = [backend.compile(program, prepared, capture=how) for how in (tokens != 3, False)]
    rng = np.random.default_rng(5)
    for number, tokens in enumerate((4, 2, 3, 4, 4, 2, 3, 2, 4)):
        emulator.seed(number)
        hidden, of_ranks = backend.put(given[tokens].hidden(seed=number)), batches(given[tokens], rng)
        got, want = (
            host(run(cache, hidden, of_ranks)) for run, cache in zip(runs[tokens], (caches, fresh), strict=True)
        )
        assert all(map(torch.equal, got, want)), number


def late(pair: Pair, emulator: Any, steps: int) -> bool:
    """Whether steps that nobody waits between are right under a seed: the host runs ahead of the device."""
    rng = np.random.default_rng(1)
    plans = [batches(pair.given, rng) for _ in range(steps)]
    hidden = [pair.backend.put(pair.given.hidden(seed=number)) for number in range(steps)]
    wanted = []
    for number in range(steps):
        wanted.append([out.cpu() for out in pair.eager(pair.caches[1], hidden[number], plans[number])[0]])
    torch.npu.synchronize()
    found = []
    for number in range(steps):
        found.append([out.clone() for out in pair.captured(pair.caches[0], hidden[number], plans[number])[0]])
    torch.npu.synchronize()
    return all(
        torch.equal(one.cpu(), other)
        for got, want in zip(found, wanted, strict=True)
        for one, other in zip(got, want, strict=True)
    )


def test_a_host_that_runs_ahead(emulator):
    pair = Pair(GIVEN, "attention-aside")
    for seed in range(3):
        emulator.seed(seed)
        assert late(pair, emulator, 4), seed


def test_updates_that_do_not_wait_for_the_replay_before_go_wrong(emulator, monkeypatch):
    """What the event behind a replay is for: an update changes a launch that has yet to run, or a record is lost."""
    pair = Pair(GIVEN, "attention-aside")
    assert late(pair, emulator, 1)
    stream = type(pair.backend.device.stream(UPDATE))
    real = stream.wait_event
    update = pair.backend.device.stream(UPDATE)
    monkeypatch.setattr(stream, "wait_event", lambda s, event: None if s is update else real(s, event))

    def wrong(seed: int) -> bool:
        emulator.seed(seed)
        try:
            return not late(pair, emulator, 4)
        except RuntimeError as error:
            assert "deadlock" in str(error)
            emulator.recover()
            return True

    assert any(map(wrong, range(10)))


# --- what is counted ----------------------------------------------------------------------------------------------


def issued(emulator: Any, pair: Pair, run: Any, caches: Any, of_ranks: list[Any]) -> dict[str, int]:
    """What the host gives the device in a step, by kind: the second one, and without copies back."""
    hidden = pair.backend.put(pair.given.hidden())
    run(caches, hidden, of_ranks)
    with emulator.tracing() as trace:
        run(caches, hidden, of_ranks)
    kinds = [task.kind for task in trace if not task.graph]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def test_host_calls_of_a_step(emulator):
    """One replay and one copy, whatever the layers; an update for each attention with lengths that change, and its
    event; and the events of the staging buffer and of the replay.  The table of the README is what is counted."""
    rows: dict[str, list[int]] = {name: [] for name in ROWS}
    for layers in (1, 3):
        given = evolve(GIVEN, ranks=1, layers=layers, tokens=3)
        plan = given.batches(history=(3, 0, 20, 0), query=(1, 1, 1, 0))
        pair, fixed = Pair(given, "attention-aside"), {"replay": 1, "to_device": 1, "record": 2, "wait": 1}
        made = pair.program.with_fixed({"batch.query_lengths": (1, 1, 1, 0)})
        single = pair.backend.compile(made, pair.backend.prepare(made, given.params()), capture=True)
        eager = issued(emulator, pair, pair.eager, pair.caches[1], plan)
        several, once = (issued(emulator, pair, run, pair.caches[0], plan) for run in (pair.captured, single))
        assert several == {**fixed, "update": 2 * layers, "value_write": 2 * layers}
        assert once == {**fixed, "update": layers, "value_write": layers}
        for row, found in zip(rows.values(), (eager, several, once), strict=True):
            row.append(sum(found.values()))
    readme = (ROOT / "backends" / "README.md").read_text()
    told = re.findall(r"^\| ([a-z][^|]*) \| (\d+) \| (\d+) \|$", readme, re.MULTILINE)
    assert {name: [int(a), int(b)] for name, a, b in told if name in ROWS} == rows


def test_updates_of_deepseek_v3():
    """61 a step where every request has one new token, 122 otherwise."""
    config = deepseek_v3_config()
    program = schedule(model_step(config, StepShape(ranks=8, tokens=4, requests=4)), orchestrations.attention_aside)
    assert len(program.updatable()) == 122
    assert len(program.with_fixed({"batch.query_lengths": (1,) * 4}).updatable()) == 61


def test_memory_of_several_sizes_is_that_of_the_largest(emulator):
    """And of each what it returns, and where its inputs are copied to."""
    backend = backends.get("ascend", ranks=1)
    caches, prepared, kept, grown, reserved = None, None, [], [], []
    for tokens in (16, 8, 4, 2):
        given = evolve(GIVEN, ranks=1, layers=2, tokens=tokens, requests=2)
        caches = caches or backend.put(given.caches())
        program = schedule(backend.lower(given.step), orchestrations.attention_aside)
        prepared = prepared or backend.prepare(program, given.params())
        run = backend.compile(program, prepared, capture=True)
        given_to = (caches, given.hidden(), given.batches(history=(3, 0), query=(1, tokens - 1)))
        run(*given_to)
        torch.npu.synchronize()
        before = torch.npu.memory_stats()
        run = backend.compile(program, prepared, capture=True)
        run(*given_to)
        kept.append(run)
        after = torch.npu.memory_stats()
        grown.append(after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"])
        reserved.append(after["reserved_bytes.all.current"])
        outputs = [out for out in run.body.results if out is not None]
        staged = len(run.body.staging.sent)
        due = sum(-(-out.nbytes // 512) * 512 for out in outputs) + -(-staged // 512) * 512
        assert grown[-1] <= due + 8192, (tokens, grown[-1], due)
    assert reserved[1:] == reserved[:1] * 3


# --- refused ------------------------------------------------------------------------------------------------------


def test_tokens_of_no_request_are_refused(emulator):
    pair = Pair(evolve(GIVEN, ranks=1), "serial")
    short = pair.given.batches(history=(3, 0), query=(1, 2))
    why = r"query_lengths: the sum must be T = 4, tokens of padding being a request's: got 3, from \(1, 2, 0, 0\)"
    hidden = pair.backend.put(pair.given.hidden())
    for number in range(2):  # before it is captured, and behind
        before = host(pair.caches[0])
        with pytest.raises(InputError, match=f"capture: history_attention cannot be updated: {why}"):
            pair.captured(pair.caches[0], hidden, short)
        assert all(map(torch.equal, host(pair.caches[0]), before))
        pair.same(number, pair.given.batches(history=(3, 0), query=(1, 3)))
    pair.same(1, pair.given.batches(history=(9, 0), query=(2, 2)))


def test_float32_attention_is_plain_torch_and_not_captured(emulator):
    with pytest.raises(InputError, match="capture: history_attention cannot be updated: its attention in fp32"):
        Pair(Setup(ranks=1, tokens=3, requests=2), "serial")


# --- processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_processes(processes, ranks):
    assert processes.run(do.captured, ranks=ranks, steps=3) == [True] * ranks
