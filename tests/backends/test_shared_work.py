"""Ranks of a process that share work: the bits of ranks that each do all of it, and nothing that one writes is shared.

The oracle is the same program with `apart=True`, where a row is run for every rank.
"""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch.utils import _pytree as pytree

from mla_fx import Layout, backends, orchestrations
from mla_fx.backends import Backend, Collective, Prepared
from mla_fx.backends.rules import collective_of, met
from mla_fx.backends.several import Several
from mla_fx.effects import MAIN, Group, Op, Program, bind, ops, schedule
from tests.effects import toys
from tests.effects.toys import mix
from tests.setups import Setup

EIGHT = Layout(tp=4, dcp=2, dp=2)
STEPS = {
    "attention": Setup(ranks=4),
    "in 16 bits": Setup(ranks=4, dtype="bf16"),
    "queries of all heads": Setup(ranks=4, replicate_query=True),
    "values before the merge": Setup(ranks=2, project_before_merge=True, replicate_query=True),
    "expanded": Setup(ranks=2, project_before_merge=True, expand_current=True),
    "in two parts": Setup(ranks=2, split="attention"),
    "a model": Setup(ranks=8, layers=2, interleave=2),
    "a model in two parts": Setup(ranks=2, layers=2, split="layers"),
    "context groups": Setup(ranks=Layout(tp=4, dcp=2), layers=2, dtype="fp16"),
    "experts over replicas": Setup(ranks=EIGHT, layers=2, dtype="bf16"),
    "in 8 bits": Setup(ranks=EIGHT, layers=2, quantization="w8a8"),
}


def bits(tree: Any) -> list[bytes]:
    return [leaf.view(torch.uint8).numpy().tobytes() for leaf in pytree.tree_leaves(tree)]


STEP_COUNT = 2


@lru_cache(maxsize=1)
def prepared(name: str, setup: Setup, adversary: int | None) -> tuple[Program, Prepared]:
    """The step, and parameters for all backends of this name."""
    program = schedule(setup.step, orchestrations.attention_aside)
    return program, backends.get(name, ranks=setup.layout, adversary=adversary).prepare(program, setup.params())


def outcome(backend: Backend, setup: Setup, given: Callable[[Any], Any] = lambda one: one) -> list[bytes]:
    """Results and caches of two steps, one behind the other; `given` of a rank's part of the inputs."""
    run = backend.compile(*prepared(backend.name, setup, backend.adversary))
    caches = backend.put(setup.caches(), copy=True)
    found = []
    for step in range(STEP_COUNT):
        batches = setup.batches((9 + step, 5 + 2 * step), (1, 2))
        out, caches = run(caches, backend.put([given(one) for one in setup.hidden()]), [given(one) for one in batches])
        found += bits((out, caches))
    return found


@pytest.mark.parametrize("setup", STEPS.values(), ids=STEPS)
def test_bits_are_those_of_ranks_apart(setup):
    shared = backends.get("cpu", ranks=setup.layout)
    assert outcome(shared, setup) == outcome(evolve(shared, apart=True), setup)


@pytest.mark.parametrize("setup", [STEPS["attention"], STEPS["context groups"]], ids=str)
def test_so_it_is_for_the_reference_and_the_hostile_machine(setup):
    """Which plays each rank apart."""
    exact = backends.get("reference", ranks=setup.layout)
    assert outcome(exact, setup) == outcome(evolve(exact, apart=True), setup)
    hostile = backends.get("cpu", ranks=setup.layout, adversary=3)
    assert outcome(hostile, setup) == outcome(backends.get("cpu", ranks=setup.layout), setup)


@pytest.mark.parametrize("setup", [STEPS["attention"], STEPS["experts over replicas"]], ids=str)
def test_inputs_that_are_equal_but_not_one_tensor_are_not_taken_for_one(setup):
    shared = backends.get("cpu", ranks=setup.layout)
    copied = lambda tree: pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)  # noqa: E731
    assert outcome(shared, setup, copied) == outcome(evolve(shared, apart=True), setup)


def test_ranks_with_hidden_states_of_their_own_get_their_own_results():
    """One executable, called with what is shared, with what is not, and with what is shared again."""
    setup = Setup(ranks=2)
    program = schedule(setup.step, orchestrations.attention_aside)
    shared = backends.get("cpu", ranks=2)
    runs = [setup.compiled(one, program) for one in (shared, evolve(shared, apart=True))]
    x, other = setup.hidden()[0], setup.hidden(seed=5)[0]
    for hidden in ([x, x], [x, other], [other, x], [x, x]):
        ours, wanted = (bits(run(setup.caches(), hidden, setup.batches())) for run in runs)
        assert ours == wanted


def counted(backend: Backend) -> tuple[Backend, Counter[str], Counter[str]]:
    """A backend whose calls of rules are counted, by op; and the ranks that they were for."""
    calls: Counter[str] = Counter()
    ranks: Counter[str] = Counter()

    def counting(op: type[Op], rule: Any) -> Any:
        def called(*operands: Any, **given: Any) -> Any:
            calls[op.__name__] += 1
            ranks[op.__name__] += len(given.get("runs", [None]))
            return rule(*operands, **given)

        return called

    rules = {
        op: Collective(rule.send, counting(op, rule.receive), rule.together and counting(op, rule.together))
        if isinstance(rule, Collective)
        else counting(op, rule)
        for op, rule in backend.table.rules.items()
    }
    together = {op: counting(op, rule) for op, rule in backend.table.together.items()}
    return evolve(backend, table=evolve(backend.table, rules=rules, together=together)), calls, ranks


def test_what_is_the_same_is_done_once():
    """Of a layer on 4 ranks: everything before own heads, and behind a sum; what is own, on each, in one call."""
    setup = Setup(ranks=4, layers=1)
    backend, calls, served = counted(backends.get("cpu", ranks=4))
    apart, each, _ = counted(evolve(backends.get("cpu", ranks=4), apart=True))
    for one in (backend, apart):
        outcome(one, setup)
    times, ranks = STEP_COUNT, 4
    launches = Counter(type(launch.op).__name__ for launch in schedule(setup.step, orchestrations.serial).launches)
    assert each == {name: times * ranks * count for name, count in launches.items()}
    once = {"AllGather", "AllReduce", "AllToAll", "GatherHeads", "RmsNorm", "RopeAngles", "Add"}
    assert {name for name, count in served.items() if count == times * launches[name]} == once
    own = {"Embedding", "AbsorbQuery", "HistoryAttention", "CurrentAttention", "Combine", "VUp", "WriteRows", "Swiglu"}
    assert all(served[name] == times * ranks * launches[name] for name in own)
    assert served["Rope"] == times * (ranks + 1)  # own heads' queries, and the key
    assert served["Linear"] == times * (2 + ranks * (launches["Linear"] - 2))  # q_a and kv_a are the same on all
    assert calls == {name: times * count for name, count in launches.items()}


# --- what is written -----------------------------------------------------------------------------


def test_what_a_launch_makes_and_another_writes_is_each_ranks_own():
    """`made` is the same on both ranks until each adds its own to it, in place."""

    def function(x, own):
        (made,) = bind(toys.One(1), x)
        (same,) = bind(toys.One(2), x)
        (made,) = bind(toys.Update(3), made, own)
        return made, same

    x, owns = torch.tensor([3.0, 4.0], dtype=torch.float64), [torch.full((2,), r + 1.0).double() for r in range(2)]
    run = toys.backend().compile(schedule(toys.step_of(function), lambda e: MAIN))
    for _ in range(2):
        made, same = run([x, x], owns)
        for rank in range(2):
            assert torch.equal(made[rank], mix(mix(x, salt=1), owns[rank], salt=3))
            assert torch.equal(same[rank], mix(x, salt=2))
    assert x.tolist() == [3.0, 4.0]


def test_a_view_of_what_is_written_is_each_ranks_own():
    def function(x, own):
        (made,) = bind(toys.One(1), x)
        view, other = bind(toys.Peek(2), made)
        (seen,) = bind(toys.One(4), view)
        (made,) = bind(toys.Update(3), made, own)
        return made, seen, other

    x, owns = torch.tensor([3.0, 4.0], dtype=torch.float64), [torch.full((2,), r + 1.0).double() for r in range(2)]
    run = toys.backend().compile(schedule(toys.step_of(function), lambda e: MAIN))
    made, seen, other = run([x, x], owns)
    first = mix(x, salt=1)
    for rank in range(2):
        assert torch.equal(made[rank], mix(first, owns[rank], salt=3))
        assert torch.equal(seen[rank], mix(first, salt=4)) and torch.equal(other[rank], mix(first, salt=2))


def test_who_writes_a_result_writes_no_other_ranks():
    """Results of a sum, of an op on all ranks, and of one that gathers."""
    setup = Setup(ranks=4, layers=1)
    run = setup.compiled(backends.get("cpu", ranks=4), schedule(setup.step, orchestrations.serial))
    logits, _ = run(*setup.arguments())
    before = [one.clone() for one in logits]
    logits[0].zero_()
    assert all(torch.equal(one, right) for one, right in zip(logits[1:], before[1:], strict=True))


# --- what meets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ranks", [Layout(tp=4), EIGHT], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_what_meets_has_the_bits_that_move(ranks, dtype, tokens):
    """Any bits: NaN of all kinds, subnormals, infinities."""
    rng, four = np.random.default_rng(4), Group("tp", 4)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        count = int(np.prod(shape)) * dtype.itemsize
        drawn = torch.from_numpy(rng.integers(0, 256, count, dtype=np.uint8))
        return drawn.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)

    for op, shapes in (
        (ops.AllToAll(four), (((tokens, 8, 5), dtype), ((tokens, 8), wide))),
        (ops.GatherHeads(four), (((tokens, 2, 8), dtype), ((tokens, 2, 4), dtype))),
        (ops.AllGather(18, four), (((tokens, 5), dtype),)),
    ):
        backend = backends.get("cpu", ranks=ranks)
        given = [[drawn(*shape, dtype=of) for shape, of in shapes] for _ in backend.here]
        found = met(backend.table.rules[type(op)], op)(*[Several(of) for of in zip(*given, strict=True)])
        if op.alike:  # once for each group
            count = len(op.results)
            found = [x for k in range(0, len(found), count) for _ in range(4) for x in found[k : k + count]]
        else:
            found = [x for of_rank in zip(*found, strict=True) for x in of_rank]
        moved = collective_of(backend, op)(*[x for mine in given for x in mine])
        assert bits([x.contiguous() for x in found]) == bits([x.contiguous() for x in moved])


def test_sums_have_the_bits_that_move():
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        backend, op = backends.get("cpu", ranks=8), ops.AllReduce(Group("tp", 8))
        given = [(torch.randn(3, 5, generator=generator) * 10.0**k).to(dtype) for k in range(8)]
        moved = collective_of(backend, op)(*given)
        side_by_side = Several.empty(8, (3, 5), dtype)
        for mine, one in zip(side_by_side, given, strict=True):
            mine.copy_(one)
        for several in (Several(given), side_by_side):
            (found,) = met(backend.table.rules[type(op)], op)(several)
            assert all(bits(found) == bits(one) for one in moved)
            assert found.untyped_storage().data_ptr() not in {x.untyped_storage().data_ptr() for x in several}


# --- parameters ----------------------------------------------------------------------------------


def test_parameters_that_are_equal_are_one():
    """Bit for bit: a zero is not a negative one, and a NaN is itself."""
    setup = Setup(ranks=Layout(tp=2, dp=2))
    params = setup.params()
    params[1].kv_a_layernorm[0] = -0.0
    for rank in (0, 2, 3):
        params[rank].kv_a_layernorm[0] = 0.0
        params[rank].kv_a_proj[0, 0] = torch.nan
    found = backends.get("cpu", ranks=setup.layout).prepare(setup.step, params)
    norms, keys, values = (found.leaves[f"params.{name}"] for name in ("kv_a_layernorm", "kv_a_proj", "w_uv"))
    assert [[a is b for b in norms].index(True) for a in norms] == [0, 1, 0, 0]
    assert [[a is b for b in keys].index(True) for a in keys] == [0, 1, 0, 0]
    assert [[a is b for b in values].index(True) for a in values] == [0, 1, 0, 1]
    assert all(bits(leaf) == bits(params[rank].kv_a_layernorm) for rank, leaf in enumerate(norms))
