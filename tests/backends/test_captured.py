"""Captured programs on a stand-in for a device with graphs, and on a GPU where there is one."""

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from mla_fx import Layout, backends, orchestrations
from mla_fx.backends import Backend, Run, RunError, cpu, cuda
from mla_fx.backends.device import Scratch
from mla_fx.effects import Aval, InputError, Program, ops, schedule
from tests.backends.cuda.conftest import on_cuda as on_cuda  # with the machine below
from tests.backends.standin import Machine, Stream
from tests.backends.standin_graphs import Graph, Graphs, Updating
from tests.backends.sums import RULES, SUMS, Plus, Twice, add, sums
from tests.cases import pairwise
from tests.setups import ANYWHERE, Setup

GIVEN = Setup(tokens=4, requests=3)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch, Graphs())


def launch_by_launch(backend: Backend) -> Backend:
    """The rules of captured programs, for programs that are not."""

    def given(rule: Any) -> Any:
        return lambda *operands, **how: rule(
            *(torch.tensor(x, device=backend.device.kind) if isinstance(x, tuple) else x for x in operands), **how
        )

    return backend.with_rules({op: given(rule) for op, rule in backend.table.captured.items()})


def steps(given: Setup, count: int, seed: int) -> list[Any]:
    """Hidden states and batches: empty shards, padding requests and padding tokens, full requests, mixed lengths."""
    rng, found = np.random.default_rng(seed), []
    for number in range(count):
        requests = int(rng.integers(1, given.requests + 1))
        query = rng.multinomial(rng.integers(0, given.tokens + 1), np.ones(requests) / requests)
        most = given.ranks * given.block_size * given.table_width - query
        history = [int(rng.choice([0, 1, rng.integers(0, top + 1)])) for top in most]
        batches = given.batches(history=tuple(history), query=tuple(map(int, query)))
        found.append((given.hidden(seed=number), batches))
    return found


def compiled(given: Setup, backend: Backend, orchestration: str, **how: Any) -> Any:
    program = schedule(given.step, orchestrations.NAMED[orchestration])
    return given.compiled(backend, program, **how)


def leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf.detach().cpu().clone() for leaf in torch.utils._pytree.tree_leaves(tree)]


def verify(given: Setup, backend: Backend, orchestration: str, count: int, seed: int) -> None:
    """Bit for bit what the same rules give launch by launch, and what the plain rules give up to rounding."""
    kinds = (backend, launch_by_launch(backend), backend)
    runs = [compiled(given, kind, orchestration, capture=k == 0) for k, kind in enumerate(kinds)]
    caches = [backend.put(given.caches(), copy=True) for _ in kinds]
    for hidden, batches in steps(given, count, seed):
        hidden = backend.put(hidden)
        got, same, near = (leaves(run(cache, hidden, batches)) for run, cache in zip(runs, caches, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(got, same, strict=True))
        torch.testing.assert_close(got, near, rtol=2e-4, atol=2e-5)
        for of_near in map(torch.utils._pytree.tree_leaves, caches[2:]):  # from the same states, or roundings add up
            for one, other in zip(of_near, torch.utils._pytree.tree_leaves(caches[0]), strict=True):
                one.copy_(other)


@pytest.mark.parametrize(*pairwise(orchestration=ANYWHERE, ranks=(1, 4), layers=(None, 2)))
def test_captured_is_what_is_run_launch_by_launch(on_cuda, orchestration, ranks, layers):
    given = evolve(GIVEN, ranks=ranks, layers=layers)
    verify(given, on_cuda(ranks), orchestration, count=4, seed=ranks)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_captured_over_many_steps(on_cuda, seed):
    rng = np.random.default_rng(seed)
    given = evolve(
        GIVEN, ranks=int(rng.choice([1, 2, 4, 8])), layers=[None, 3][seed % 2], interleave=int(rng.choice([1, 4]))
    )
    verify(given, on_cuda(given.ranks), str(rng.choice(ANYWHERE)), count=100, seed=seed)


def test_blocks_behind_the_lengths_may_hold_anything(on_cuda):
    """NaN in blocks of others and in entries that no length reaches, in table entries beyond the cache."""
    given = evolve(GIVEN, ranks=1, block_size=2)
    backend = on_cuda(1)
    run, plain = (compiled(given, backend, "serial", capture=capture) for capture in (True, False))
    hidden = backend.put(given.hidden())
    results = []
    for one in (run, plain):
        cache = backend.put(given.caches(), copy=True)
        one(cache, hidden, given.batches(history=(2, 0, 1), query=(1, 1, 1)))
        for part in cache[0]:
            part[3:12].fill_(torch.nan)  # behind request 0's three blocks, all of request 1's
        (batch,) = given.batches(history=(3, 0, 2), query=(1, 0, 2))
        batch.block_table[:, 3:] = torch.tensor([-7, 10**6, 5])
        results.append(leaves(one(cache, hidden, [batch])[0]))
    torch.testing.assert_close(*results, rtol=2e-4, atol=2e-5)
    assert all(part.isfinite().all() for part in results[0])


def test_a_request_that_is_not_a_number_stays_alone(on_cuda):
    given = evolve(GIVEN, ranks=1)
    backend = on_cuda(1)
    run = compiled(given, backend, "serial", capture=True)
    cache, batches = backend.put(given.caches(), copy=True), given.batches(history=(4, 4), query=(2, 2))
    hidden = backend.put(given.hidden())
    run(cache, hidden, batches)
    sick = [hidden[0].clone()]
    sick[0][:2] = torch.nan
    (out,) = run(cache, sick, batches)[0]
    assert out[:2].isnan().all() and out[2:].isfinite().all()


# --- what a step tells the device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, 1, 3])
def test_a_step_is_one_copy_of_each_kind_and_one_replay(machine, layers):
    given = evolve(GIVEN, ranks=1, layers=layers)
    run = compiled(given, machine.backend(1, cuda.TABLE, "cuda"), "attention-aside", capture=True)
    caches = given.caches()
    for hidden, batches in steps(given, 3, seed=4):
        told = machine.told(lambda hidden=hidden, batches=batches: run(caches, hidden, batches))
    assert told == ["host waits sent", "sent at caller", "replay", "on caller"]


def test_results_hold_until_the_next_replay(on_cuda):
    backend = on_cuda(1)
    given = evolve(GIVEN, ranks=1)
    run = compiled(given, backend, "serial", capture=True)
    cache = backend.put(given.caches(), copy=True)
    (first, second, third) = (
        run(cache, backend.put(hidden), batches)[0][0] for hidden, batches in steps(given, 3, seed=1)
    )
    assert second.data_ptr() == third.data_ptr() != first.data_ptr()


def test_a_call_from_another_stream_fills_the_same_addresses(machine):
    """And comes behind the last one, which came on the old stream."""
    given = evolve(GIVEN, ranks=1)
    backend = machine.backend(1, cuda.TABLE, "cuda")
    run, same = (
        compiled(given, kind, "serial", capture=kind is backend) for kind in (backend, launch_by_launch(backend))
    )
    caches, others = given.caches(), given.caches()
    for number, (hidden, batches) in enumerate(steps(given, 4, seed=6)):
        machine.module.current = machine.caller if number % 2 else Stream(machine.module, 77)
        got, want = leaves(run(caches, hidden, batches)), leaves(same(others, hidden, batches))
        assert all(map(torch.equal, got, want)), number


def test_all_graphs_of_a_device_share_a_pool(machine, monkeypatch):
    pools, begin = [], Graph.capture_begin
    monkeypatch.setattr(
        Graph, "capture_begin", lambda graph, pool, **how: (pools.append(pool), begin(graph, pool, **how))
    )
    backend = machine.backend(1, cuda.TABLE, "cuda")
    runs = []  # for a pool ends with the last of them
    for tokens in (4, 2):
        given = evolve(GIVEN, ranks=1, tokens=tokens)
        runs.append(compiled(given, backend, "serial", capture=True))
        runs[-1](given.caches(), given.hidden(), given.batches(query=(1, 1)))
    assert len(pools) == 2 and len(set(pools)) == 1
    runs.clear()
    compiled(given, backend, "serial", capture=True)(given.caches(), given.hidden(), given.batches(query=(1, 1)))
    assert pools[2] != pools[0]


# --- inputs and states --------------------------------------------------------------------------------------------


@pytest.fixture
def updating(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch, Updating())


def test_launches_with_integers_on_the_host_are_updated_each_once_and_in_order(updating):
    run = updating.backend(2, RULES).compile(SUMS, capture=True)
    rng = np.random.default_rng(3)
    for number in range(6):
        x = [torch.tensor(rng.standard_normal(2), dtype=torch.float32) for _ in range(2)]
        n, m = ([tuple(map(int, rng.integers(0, 50, 2))) for _ in range(2)] for _ in range(2))
        results: list[Any] = []
        told = updating.told(lambda x=x, n=n, m=m, results=results: results.append(run(x, n, m)))
        ((c, d, given),) = results
        for rank in range(2):
            torch.testing.assert_close([c[rank].tolist(), d[rank].tolist()], sums(x[rank], n[rank], m[rank]))
            assert given[rank] is x[rank]
        if number:
            assert told.count("replay") == 1 and told.index("replay") < told.index("update")
            kinds = [entry[0] for entry in updating.module.log if entry[0] in ("update", "external")]
            assert kinds == ["update", "external"] * 6


def test_integers_that_the_program_is_made_for_are_not_updated(updating):
    run = updating.backend(1, RULES).compile(SUMS.with_fixed({"n": (3, 4)}), capture=True)
    for m in ((1, 2), (5, 6), (0, 0)):
        x, results = torch.tensor([1.0, 2.0]), list[Any]()
        told = updating.told(lambda m=m, x=x, results=results: results.append(run([x], [(3, 4)], [m])))
        ((c,), (d,), _) = results[0]
        assert [c.tolist(), d.tolist()] == sums(x, (3, 4), m)
    assert told.count("update") == 1


def test_an_update_comes_behind_the_replay_before(updating):
    """Or a record could be reset by the wait of the step before."""
    run = updating.backend(1, RULES).compile(SUMS, capture=True)
    for _ in range(3):
        updating.module.log.clear()
        run([torch.ones(2)], [(1, 2)], [(3, 4)])
    log = updating.module.log
    (waited,) = [k for k, entry in enumerate(log) if entry[0] == "wait"]
    (recorded,) = [k for k, entry in enumerate(log) if entry[0] == "record"]
    assert log[waited][1] is log[recorded][1]  # the event that the step before has recorded, on the caller's stream
    assert waited < [entry[0] for entry in log].index("update") and recorded > [entry[0] for entry in log].index(
        "replay"
    )
    assert log[recorded][2] is updating.caller


def test_an_update_that_fails_holds_nobody_up(updating, monkeypatch):
    run = updating.backend(1, RULES).compile(SUMS, capture=True)
    x, n, m = [torch.ones(2)], [(1, 2)], [(3, 4)]
    for _ in range(2):
        run(x, n, m)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "add", lambda *given, **how: 1 / 0)
        with pytest.raises(RunError, match=r"'a = plus x n .* ZeroDivisionError"):
            run(x, n, m)
    updating.module.updating.__exit__(None, None, None)
    updating.module.updating = None
    assert updating.module.running is None and updating.module.current is updating.caller
    c, *_ = run(x, n, m)
    assert c[0].tolist() == sums(x[0], n[0], m[0])[0]


def test_a_floating_input_is_copied_unless_it_is_there(updating):
    """To an address that stays; the caller's tensor is never written."""
    run = updating.backend(1, RULES).compile(SUMS, capture=True)
    n, m = [(1, 2)], [(3, 4)]
    first = torch.tensor([1.0, 2.0])
    run([first], n, m)
    for x in (torch.tensor([5.0, 6.0]), torch.arange(4.0)[::2], first):
        before = x.clone()
        c, *_ = run([x], n, m)
        assert c[0].tolist() == sums(before, n[0], m[0])[0] and torch.equal(x, before)
    (static,) = [x for x in run.body.static if isinstance(x, torch.Tensor)]
    static.fill_(9)
    c, *_ = run([static], n, m)
    assert c[0].tolist() == sums(static, n[0], m[0])[0]


def test_another_state_is_refused_before_anything_is_told(machine):
    given = evolve(GIVEN, ranks=2)
    run = compiled(given, machine.backend(2, cuda.TABLE, "cuda"), "serial", capture=True)
    caches, others = given.caches(), given.caches()
    for _ in range(2):
        run(caches, given.hidden(), given.batches())
    mixed = [caches[0], caches[1]._replace(rope=others[1].rope)]
    machine.module.log.clear()
    with pytest.raises(InputError, match=r"cache.rope of rank 1: must be the tensor that was captured: got another"):
        run(mixed, given.hidden(), given.batches())
    assert machine.module.log == []
    run(caches, given.hidden(), given.batches())


def test_an_error_in_the_middle_of_a_capture_leaves_the_device_usable(updating):
    calls = []

    def fails(x: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
        calls.append(1)
        return (x * (2 if len(calls) != 2 else x.sum().item()),)  # the second is the one that is captured

    backend = updating.backend(1, {**RULES, Twice: fails})
    run = backend.compile(SUMS, capture=True)
    x, n, m = [torch.ones(2)], [(1, 2)], [(3, 4)]
    with pytest.raises(
        RunError, match=r"'b = twice a' on stream main, rank 0: WaitError: .* while a graph is captured"
    ):
        run(x, n, m)
    module = updating.module
    assert module.capturing is None and module.current is updating.caller and backend.device.recorder is None
    for _ in range(2):
        c, *_ = run(x, n, m)
        assert c[0].tolist() == sums(x[0], n[0], m[0])[0]


def test_a_rule_that_bakes_integers_in_is_refused(updating):
    def bakes(x: torch.Tensor, n: tuple[int, ...], *, run: Run) -> tuple[torch.Tensor]:
        return (x + sum(n),)

    def other(x: torch.Tensor, n: tuple[int, ...], *, run: Run) -> tuple[torch.Tensor]:
        out = torch.empty_like(x)
        run.device.issue(add, (x, out, torch.empty(1)), ((sum(n),),))
        return (out,)

    for rule, why in (
        (bakes, "must call its operator once by Device.issue .* got 0"),
        (other, r"as they are: got \(\(3,\)"),
    ):
        run = updating.backend(1, {**RULES, Plus: rule}).compile(SUMS, capture=True)
        with pytest.raises(RunError, match=why):
            run([torch.ones(2)], [(1, 2)], [(3, 4)])


# --- workspaces -----------------------------------------------------------------------------------------------------


def wider(count: int) -> Program:
    """`SUMS` with so many integers, which needs so much of the workspace."""
    inputs = tuple(evolve(put, aval=Aval((count,), "int64")) if put.place == "host" else put for put in SUMS.inputs)
    return evolve(SUMS, inputs=inputs)


def test_a_workspace_that_a_captured_program_uses_stays(updating):
    """What needs more gets a block beside it, eager or captured; updates find theirs."""
    backend = updating.backend(1, RULES)
    scratch = backend.device.scratch

    def ask(run: Any, count: int) -> None:
        x, n = torch.ones(2), tuple(range(count))
        c, *_ = run([x], [n], [n])
        assert c[0].tolist() == sums(x, n, n)[0]

    small, middle = (backend.compile(wider(count), capture=True) for count in (1, 3))
    for _ in range(2):
        ask(small, 1)
    first = scratch[0, "pad"]
    kept = first.memory
    for run, count in (
        (backend.compile(wider(2)), 2),
        (middle, 3),
        (small, 1),
        (backend.compile(wider(4)), 4),
        (middle, 3),
    ):
        ask(run, count)
    assert first.memory is kept and len(kept) == 8
    assert [len(one.memory) for one in (first.beside, first.beside.beside)] == [24, 32]
    assert first.captured and first.beside.captured and not first.beside.beside.captured


def test_a_workspace_may_not_grow_while_a_program_is_captured(updating):
    backend = updating.backend(1, RULES)
    backend.device.recorder = object()
    with pytest.raises(InputError, match="workspace: must not grow while a program is captured: got a need of 4 bytes"):
        Scratch(backend.device).room("a", lambda: 4)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_device_without_graphs_is_refused(backend):
    program = schedule(GIVEN.step, orchestrations.serial)
    made = backends.get(backend, ranks=2)
    with pytest.raises(InputError, match=r"capture: must be for a device that has graphs, .*: got cpu"):
        made.compile(program, made.prepare(program, GIVEN.params()), capture=True)
    with pytest.raises(InputError, match="capture: must not be on the hostile machine"):
        hostile = backends.get(backend, ranks=2, adversary=1)
        hostile.compile(program, hostile.prepare(program, GIVEN.params()), capture=True)


@pytest.mark.parametrize(("name", "value"), [("TASK_QUEUE_ENABLE", "2"), ("ASCEND_LAUNCH_BLOCKING", "1")])
def test_settings_that_capture_nothing_are_refused(updating, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"capture: must be done with another {name}: got {value}"):
        updating.backend(1, RULES).compile(SUMS, capture=True)


def test_a_launch_that_waits_is_refused(updating):
    """Experts over replicas: how many rows move is read on the host."""
    given = Setup(ranks=Layout(dp=2), layers=2)
    message = r"capture: must be of a program that waits for nothing: got layers.1.*, dispatch_tokens"
    with pytest.raises(InputError, match=message):
        compiled(given, updating.backend(given.layout, cpu.TABLE), "serial", capture=True)


def test_an_op_without_a_rule_for_integers_on_the_device_is_refused(machine):
    given = evolve(GIVEN, ranks=1, project_before_merge=True, expand_current=True)
    with pytest.raises(InputError, match="capture: attention, expanded_attention must have a rule that takes integers"):
        compiled(given, machine.backend(1, cuda.TABLE, "cuda"), "serial", capture=True)


def test_a_replaced_rule_takes_its_captured_form_with_it():
    changed = cuda.TABLE.with_rules({ops.HistoryAttention: cuda.history_attention.rule})
    assert set(changed.captured) == {ops.CurrentAttention}
