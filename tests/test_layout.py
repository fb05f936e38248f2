"""Layouts: who is in which group, by dealing ranks out; and the attention of a layer, the same in every layout."""

import functools
from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from torch.distributed.device_mesh import DeviceMesh

from mla_fx import Layout, Sharding, StepShape, attention_step, backends, orchestrations, plan_step
from mla_fx.effects import Group, InputError, schedule
from mla_fx.layout import layout_of
from mla_fx.parameters import empty_cache
from mla_fx.weights import random_attention, shard_attention, shares
from tests.setups import CONFIG, Setup

#: tp, dcp, dp.
SIZES = [(8, 8, 1), (8, 4, 1), (8, 2, 1), (4, 4, 2), (2, 1, 4), (1, 1, 4)]
LAYOUTS = [Layout(tp=tp, dcp=dcp, dp=dp) for tp, dcp, dp in SIZES]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


@each_layout
def test_groups_are_dealt_out_side_by_side(layout):
    """Replicas one behind the other, context groups one behind the other in each, ranks in their order."""
    everyone = list(range(layout.size))
    replicas = [everyone[k * layout.tp : (k + 1) * layout.tp] for k in range(layout.dp)]
    contexts = [one[k : k + layout.dcp] for one in replicas for k in range(0, layout.tp, layout.dcp)]
    for name, groups in (("ep", [everyone]), ("tp", replicas), ("dcp", contexts)):
        assert sorted(rank for group in groups for rank in group) == everyone
        for group in groups:
            assert layout.group(name) == Group(name, len(group))
            for index, rank in enumerate(group):
                assert layout.members(name, rank) == tuple(group)
                assert layout.index(name, rank) == index
    assert [rank for k, one in enumerate(replicas) for rank in one if layout.replica(rank) == k] == everyone


@each_layout
def test_text_and_back(layout):
    assert Layout.parse(str(layout)) == layout
    assert str(layout) == f"tp={layout.tp},dcp={layout.dcp},dp={layout.dp},ep={layout.tp * layout.dp}"


def test_defaults():
    assert Layout() == Layout(tp=1, dcp=1, dp=1, ep=1) == layout_of(1)
    assert Layout(tp=8) == Layout(tp=8, dcp=8, dp=1, ep=8) == layout_of(8) == layout_of(Layout(tp=8))
    assert Layout.parse(" dp=2, tp=4") == Layout(tp=4, dcp=4, dp=2, ep=8)
    assert StepShape(ranks=8).layout == Layout(tp=8) and StepShape(ranks=Layout(tp=4, dcp=2, dp=2)).ranks == 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(tp=8, dcp=3), "dcp: must divide tp, 8: got 3"),
        (lambda: Layout(tp=2, dcp=4), "dcp: must divide tp, 2: got 4"),
        (lambda: Layout(tp=4, dp=2, ep=4), "ep: must be tp * dp = 4 * 2 = 8: got 4"),
        (lambda: Layout(dp=0), "dp: must be an integer of at least 1: got 0"),
        (lambda: Layout(tp=4).group("pp"), "group: must be one of tp, dcp, ep: got 'pp'"),
        (lambda: layout_of(True), "ranks: must be an integer of at least 1, or a Layout: got True"),
        *(
            (partial(Layout.parse, text), f"layout: must be like tp=16,dcp=8,dp=2,ep=32, each once: got {text!r}")
            for text in ("", "8", "tp=4,tp=4", "pp=2", "tp=-1", "tp=4;dcp=2")
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value) == message


def mesh(sizes: tuple[int, ...], *names: str, order: tuple[int, ...] | None = None) -> DeviceMesh:
    """A mesh without groups, its dimensions in another `order`."""
    ranks = torch.arange(int(torch.tensor(sizes).prod())).view(sizes)
    ranks = ranks if order is None else ranks.permute(order)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names or None, _init_backend=False, _rank=0)


def test_of_a_mesh():
    assert Layout.from_mesh(mesh((2, 4), "dp", "tp")) == Layout(tp=4, dp=2)
    assert Layout.from_mesh(mesh((2, 2, 4), "dp", "tp", "dcp")) == Layout(tp=8, dcp=4, dp=2)
    assert Layout.from_mesh(mesh((4,), "dcp")) == Layout(tp=4)
    assert Layout.from_mesh(mesh((4,), "dp")) == Layout(dp=4)
    assert Layout.from_mesh(mesh((2, 4, 1), "dp", "tp", "dcp")) == Layout(tp=4, dcp=1, dp=2)
    with pytest.raises(InputError, match=r"dimensions of \('dp', 'tp', 'dcp'\), in this order: got None"):
        Layout.from_mesh(mesh((4,)))
    with pytest.raises(InputError, match=r"in this order: got \('tp', 'dp'\)"):
        Layout.from_mesh(mesh((2, 2), "tp", "dp"))
    with pytest.raises(InputError, match=r"mesh: must have the ranks 0, 1, 2, ... in order: got \[0, 2, 1, 3\]"):
        Layout.from_mesh(mesh((2, 2), "dp", "tp", order=(1, 0)))


def test_heads_of_a_context_group():
    """With a replicated query a rank projects the queries of its context group's heads, not of all."""
    of = [shares(rank, Layout(tp=4, dcp=2, dp=2)) for rank in range(8)]
    assert [one["contexts"].part(8) for one in of] == [slice(0, 4), slice(0, 4), slice(4, 8), slice(4, 8)] * 2
    assert [one["tp"].part(8) for one in of] == [slice(k, k + 2) for k in (0, 2, 4, 6)] * 2
    assert [one["ep"].part(16) for one in of] == [slice(k, k + 2) for k in range(0, 16, 2)]


# --- one layer -------------------------------------------------------------------

#: Steps of two requests, by replica: history and new tokens.
STEPS = [[(0, 5), (0, 3)], [(5, 1), (3, 2)], [(6, 2), (5, 1)]]


def attended(layout: Layout, name: str = "reference", seed: int | None = None, **form: Any) -> list[list[torch.Tensor]]:
    """What every rank gets in every step; each replica has hidden states of its own, the next number of the seed."""
    config, backend = CONFIG, backends.get(name, ranks=layout, adversary=seed)
    generator, ranks = torch.Generator().manual_seed(0), range(layout.size)
    full = random_attention(config, generator=generator, dtype=torch.float32)
    shape = StepShape(ranks=layout, tokens=8, requests=2, blocks=16, block_size=2, table_width=8, dtype="fp32", **form)
    program = schedule(attention_step(config, shape), orchestrations.attention_aside)
    params = [shard_attention(full, config, rank=rank, ranks=layout, **shape.form) for rank in ranks]
    run = backend.compile(program, backend.prepare(program, params))
    caches = [empty_cache(config, blocks=16, block_size=2, dtype=torch.float32)[0] for _ in ranks]
    cache, found = backend.put(caches, copy=True), []
    table = torch.randperm(16, generator=generator).view(2, 8)
    for number, step in enumerate(STEPS):
        hidden = [
            torch.randn(8, config.hidden_size, generator=torch.Generator().manual_seed(100 * number + replica))
            for replica in range(layout.dp)
        ]
        history, query = zip(*step, strict=True)
        batches = plan_step(
            Sharding(ranks=layout.dcp, block_size=2), shape, history=history, query=query, block_table=table
        )
        out, cache = run(
            cache,
            [backend.put(hidden[layout.replica(rank)]) for rank in ranks],
            [batches[layout.index("dcp", rank)] for rank in ranks],
        )
        found.append([one[: sum(query)].clone() for one in out])
    return found


@functools.cache
def on_ranks_alone(dp: int) -> list[list[torch.Tensor]]:
    """Each replica one rank."""
    return attended(Layout(dp=dp))


FORMS: dict[str, dict[str, bool]] = {
    "plain": {},
    "replicated query": {"replicate_query": True},
    "projected": {"project_before_merge": True},
    "all": {"replicate_query": True, "project_before_merge": True, "expand_current": True},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@each_layout
def test_a_layer_is_that_of_one_rank(layout, form):
    """Each replica gets what one rank alone makes of its hidden states, in every form of the weights."""
    for got, want in zip(attended(layout, **form), on_ranks_alone(layout.dp), strict=True):
        for rank, out in enumerate(got):
            torch.testing.assert_close(out, want[layout.replica(rank)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", [Layout(tp=4, dcp=2), Layout(tp=2, dcp=1, dp=2)], ids=str)
def test_the_hostile_machine_changes_nothing(layout):
    plain = attended(layout, "cpu")
    for seed in range(2):
        for got, want in zip(attended(layout, "cpu", seed), plain, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


# --- a model with experts ----------------------------------------------------------


def logits(given: Setup, name: str, arguments: Any, seed: int | None = None) -> list[torch.Tensor]:
    backend = backends.get(name, ranks=given.layout, adversary=seed)
    run = given.compiled(backend, schedule(given.step, orchestrations.attention_aside))
    out: list[torch.Tensor] = run(*backend.put(arguments, copy=True))[0]
    return out


def replicas_alone(given: Setup, name: str, arguments: Any) -> list[torch.Tensor]:
    """What every rank gets where its replica has all experts to itself."""
    layout, found = given.layout, list[torch.Tensor]()
    alone = evolve(given, ranks=Layout(tp=layout.tp, dcp=layout.dcp))
    for replica in range(layout.dp):
        own = slice(replica * layout.tp, (replica + 1) * layout.tp)
        found += logits(alone, name, tuple(of_ranks[own] for of_ranks in arguments))
    return found


REPLICAS = [*(layout for layout in LAYOUTS if layout.dp > 1), Layout(tp=4, dcp=2, dp=2)]


@pytest.mark.parametrize("layout", REPLICAS, ids=str)
def test_experts_over_all_replicas(layout):
    """Each replica gets what it would alone; of four experts over eight ranks, four ranks have none."""
    given = Setup(ranks=layout, layers=2)
    arguments = given.arguments()
    for got, want in zip(
        logits(given, "reference", arguments), replicas_alone(given, "reference", arguments), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "changes", [{"dtype": "bf16"}, {"quantization": "w8a8"}, {"split": "layers"}], ids=["bf16", "w8a8", "micro-batches"]
)
def test_experts_over_all_replicas_in_other_forms(changes):
    given = Setup(ranks=Layout(tp=2, dcp=1, dp=2), layers=2, **changes)
    arguments = given.arguments()
    for got, want in zip(logits(given, "cpu", arguments), replicas_alone(given, "cpu", arguments), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0.05 if given.dtype == "bf16" else 1e-5)


def test_a_replica_without_requests_takes_part():
    """All its tokens are padding, and the other one gets what it would alone."""
    given = Setup(ranks=Layout(tp=2, dp=2), layers=2)
    caches, tokens, batches = given.arguments()
    idle = given.batches(history=(), query=())
    arguments = caches, tokens, [*batches[:2], *idle[2:]]
    got, want = logits(given, "reference", arguments), replicas_alone(given, "reference", arguments)
    for rank in (0, 1):
        torch.testing.assert_close(got[rank], want[rank], rtol=1e-11, atol=1e-11)


def test_the_hostile_machine_changes_nothing_of_experts():
    given = Setup(ranks=Layout(tp=2, dcp=1, dp=2), layers=2)
    plain = logits(given, "cpu", given.arguments())
    for seed in range(2):
        assert all(map(torch.equal, logits(given, "cpu", given.arguments(), seed), plain))


def test_a_program_is_for_the_layout_of_its_backend():
    """Groups of the same sizes elsewhere are other groups."""
    shape = StepShape(ranks=Layout(tp=4, dcp=2), dtype="fp32")
    program = schedule(attention_step(CONFIG, shape), orchestrations.serial)
    with pytest.raises(InputError, match=r"gather_heads: is for the 2 ranks of dcp\[2\]: got a backend of tp=4,dcp=4,"):
        backends.get("cpu", ranks=4).compile(program)
    other = evolve(shape, ranks=Layout(tp=2, dcp=2, dp=2))
    with pytest.raises(InputError, match=r"all_reduce: is for the 4 ranks of tp\[4\]: got a backend of tp=2,dcp=2,"):
        backends.get("cpu", ranks=other.layout).compile(program)
