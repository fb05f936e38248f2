"""Rules of the experts and of the vocabulary on the emulator: against the reference, for every share of a rank.

Rows that an operator leaves unwritten are NaN on the emulator, and in what is given to a rule here.
"""

import math
import re

import attrs
import pytest
import torch

from mla_fx.backends import Run, cpu, reference
from mla_fx.effects import Group, ops
from tests.backends.ascend.conftest import (
    ask,
    close,
    given_to,
    on_device,
    over_ranks,
    program_of,
    random,
    refused,
    to_device,
)
from tests.backends.ascend.steps import ascend
from tests.backends.ascend.test_rules import each_count, each_dtype, right, verify
from tests.ops.conftest import aval, fields

pytestmark = pytest.mark.usefixtures("emulator")
npu = torch.ops.npu
#: DeepSeek-V3's gate.
V3 = ops.GatingTopK(top_k=8, groups=8, top_groups=4, scale=2.5)


def issued(emulator, op, *operands, rank=0) -> list[str]:
    """Operators that a rule issues; the host must not wait for any of them."""
    given = given_to(op, operands)
    emulator.synchronize()
    with emulator.tracing() as trace:
        ask(op, *given, rank=rank)
        assert emulator.ran() == 0
    return [task.name for task in trace if task.kind == "operator"]


# --- vocabulary ------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize(("vocabulary", "ranks"), [(19, 4), (9, 8), (6, 1)], ids=["padded", "a rank without", "one"])
@pytest.mark.parametrize("tokens", [[], [3], [0, -1, 5, 4, 8, 8, 9, 18, 19]], ids=str)
def test_embedding(rng, dtype, vocabulary, ranks, tokens):
    """As the reference even behind the vocabulary, in the rows that fill the last rank up."""
    own = -(-vocabulary // ranks)
    table = random(rng, ranks * own, 6, dtype=dtype)
    table[vocabulary:] = math.nan
    op, given = ops.Embedding(vocabulary, Group("tp", ranks)), torch.tensor(tokens, dtype=torch.int64)
    for rank in range(ranks):
        shard = table[rank * own : (rank + 1) * own]
        (got,) = on_device(op, given, shard, rank=rank)
        assert got.dtype == dtype and torch.equal(got.double(), right(op, given, shard, rank=rank)[0])


@each_dtype
@pytest.mark.parametrize("rows", [[], [2], [0, 2, 2, 1]], ids=str)
def test_take_rows(rng, dtype, rows):
    x, wanted = random(rng, 3, 5, dtype=dtype), torch.tensor(rows, dtype=torch.int64)
    (got,) = on_device(ops.TakeRows(), x, wanted)
    assert torch.equal(got, x[wanted])


@each_dtype
@each_count
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_all_gather(rng, dtype, tokens, ranks):
    """19 features over the ranks: the last ones' padding, NaN here, is left out."""
    own = -(-19 // ranks)
    whole = torch.cat(
        (random(rng, tokens, 19, dtype=dtype), torch.full((tokens, ranks * own - 19), math.nan).to(dtype)), 1
    )
    given = [(part.contiguous(),) for part in whole.split(own, 1)]
    got = over_ranks(ops.AllGather(19, Group("tp", ranks)), given)
    assert len(got) == ranks
    for (out,) in got:
        assert torch.equal(out, whole[:, :19]) and out.is_contiguous()


def test_gathered_features_are_each_ranks_own():
    x = torch.ones(2, 3).npu()
    run = ascend(1).compile(program_of(ops.AllGather(3, Group("tp", 1)), [aval(x)]))
    ((out,),) = run([x])
    assert out.data_ptr() != x.data_ptr()


def test_vocabulary_does_not_wait(rng, emulator):
    tokens, table = torch.tensor([1, 2]), random(rng, 5, 4, dtype=torch.float32)
    assert issued(emulator, ops.Embedding(19, Group("tp", 4)), tokens, table, rank=1)
    assert issued(emulator, ops.TakeRows(), table, tokens) == ["aclnnIndexSelect"]


# --- activation and gate ------------------------------------------------------------


@each_dtype
@each_count
def test_swiglu(rng, emulator, dtype, tokens):
    x = 4 * random(rng, tokens, 14, dtype=dtype)
    verify(ops.Swiglu(), x)
    verify(ops.Swiglu(), x.t().contiguous().t())
    assert issued(emulator, ops.Swiglu(), x) == (["aclnnSwiGlu"] if tokens else [])


@each_dtype
@each_count
def test_gate_logits(rng, dtype, tokens):
    """Float32 all the way: a logit rounded to 16 bits would be off by 0.4 per cent."""
    x, weight = random(rng, tokens, 64, dtype=dtype), random(rng, 6, 64, dtype=dtype)
    (got,) = verify(ops.GateLogits(), x, weight)
    assert got.dtype == torch.float32


def gate(rng, tokens, experts):
    return random(rng, tokens, experts, dtype=torch.float32), random(rng, experts, dtype=torch.float32)


def verify_gating(op, logits, bias):
    (weights, experts), (want, chosen) = on_device(op, logits, bias), right(op, logits, bias)
    assert experts.dtype == torch.int32 and torch.equal(experts, chosen)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize(
    ("op", "experts"),
    [
        (V3, 256),
        (attrs.evolve(V3, groups=1, top_groups=1), 256),
        (attrs.evolve(V3, top_groups=8), 256),
        (attrs.evolve(V3, group_score="max", scale=1.0), 256),
        (attrs.evolve(V3, top_k=3, groups=2, top_groups=1), 6),
        (attrs.evolve(V3, top_k=1, groups=1, top_groups=1), 2048),
    ],
    ids=["v3", "one group", "all groups", "max", "three a group", "2048"],
)
def test_gate_that_the_operator_takes(rng, emulator, op, experts, tokens):
    verify_gating(op, *gate(rng, tokens, experts))
    assert issued(emulator, op, *gate(rng, tokens, experts)) == (["aclnnMoeGatingTopK"] if tokens else [])


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize(
    ("op", "experts"),
    [
        (attrs.evolve(V3, scoring="softmax", normalise=False, group_score="max", top_groups=3, top_k=6), 160),
        (attrs.evolve(V3, scoring="softmax"), 64),
        (attrs.evolve(V3, normalise=False), 256),
        (attrs.evolve(V3, top_k=2, groups=4, top_groups=2), 8),
        (attrs.evolve(V3, groups=1, top_groups=1), 2080),
        (attrs.evolve(V3, groups=100, top_groups=4), 400),
    ],
    ids=["v2", "softmax, normalised", "not normalised", "two a group", "2080", "padded too far"],
)
def test_gate_that_plain_torch_takes(rng, emulator, op, experts, tokens):
    verify_gating(op, *gate(rng, tokens, experts))
    names = issued(emulator, op, *gate(rng, tokens, experts))
    assert "aclnnMoeGatingTopK" not in names and ("aclnnSort" in names) == bool(tokens)


@pytest.mark.parametrize("op", [V3, attrs.evolve(V3, normalise=False)], ids=["operator", "plain"])
def test_ties_go_to_the_lower_expert(op):
    logits = torch.zeros(2, 256)
    logits[1, 200:] = 1
    (_, experts) = on_device(op, logits, torch.zeros(256))
    assert experts.tolist() == [list(range(8)), [*range(200, 208)]]


@pytest.mark.parametrize("op", [V3, attrs.evolve(V3, normalise=False)], ids=["operator", "plain"])
def test_dropped_groups_lose_against_negative_scores(rng, op):
    logits, bias = gate(rng, 3, 256)
    verify_gating(op, logits, bias - 50)


# --- routing and grouped product ------------------------------------------------------

ROUTES = {
    "all here": ([[0, 3, 2], [1, 0, 2], [3, 1, 0]], 4, 1, 0),
    "none here": ([[0, 3, 2], [1, 0, 2]], 4, 2, 1),
    "some": ([[0, 7, 2], [5, 4, 1], [6, 3, 4], [4, 5, 7]], 2, 4, 2),
    "one token": ([[5, 2]], 2, 4, 1),
    "one expert a rank": ([[0, 2], [2, 1], [1, 2]], 1, 3, 2),
    "no tokens": ([], 4, 2, 0),
}
each_route = pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())


def routed(rng, route, dtype, features=6):
    experts, own, ranks, rank = route
    chosen = torch.tensor(experts, dtype=torch.int32).view(len(experts), -1 if experts else 3)
    return ops.PermuteTokens(own, Group("ep", ranks)), random(rng, len(experts), features, dtype=dtype), chosen, rank


@each_dtype
@each_route
def test_permute_tokens(rng, emulator, dtype, route):
    op, x, experts, rank = routed(rng, route, dtype)
    (rows, counts, source), (want, numbers, places) = (f(op, x, experts, rank=rank) for f in (on_device, right))
    assert rows.shape == want.shape and counts.dtype == torch.int64 and source.dtype == torch.int32
    assert torch.equal(counts, numbers) and torch.equal(source, places)
    here = int(counts.sum())
    assert torch.equal(rows[:here].double(), want[:here]) and rows[here:].isnan().all()
    assert issued(emulator, op, x, experts, rank=rank) == ["aclnnMoeInitRoutingV3" if len(x) else "aclnnInplaceZero"]


GROUPS = {"some": ([2, 0, 3], 7), "all": ([1, 4], 5), "none": ([0, 0], 3), "one": ([2], 4), "no rows": ([0, 0], 0)}


@each_dtype
@pytest.mark.parametrize(("counts", "size"), GROUPS.values(), ids=GROUPS.keys())
def test_grouped_linear(rng, emulator, dtype, counts, size):
    """Rows behind the counts are not read; the weight is read where it lies."""
    rows, weight = random(rng, size, 12, dtype=dtype), random(rng, len(counts), 5, 12, dtype=dtype)
    rows[sum(counts) :] = math.nan
    given = rows, weight, torch.tensor(counts)
    (got,), (want,) = on_device(ops.GroupedLinear(), *given), right(ops.GroupedLinear(), *given)
    assert got.dtype == dtype and got.shape == want.shape
    close(got[: sum(counts)], want[: sum(counts)])
    assert got[sum(counts) :].isnan().all()
    assert issued(emulator, ops.GroupedLinear(), *given) == (["aclnnGroupedMatmulV5"] if size else [])


@each_dtype
@each_route
def test_unpermute_tokens(rng, emulator, dtype, route):
    op, x, experts, rank = routed(rng, route, dtype)
    _, counts, source = right(op, x, experts, rank=rank)
    rows = random(rng, experts.numel(), 6, dtype=dtype)
    rows[int(counts.sum()) :] = math.nan
    weights = random(rng, *experts.shape, dtype=torch.float32).masked_fill(source < 0, math.nan)
    (got,) = verify(ops.UnpermuteTokens(), rows, source, weights)
    assert got.dtype == dtype and got.isfinite().all()
    for t, sources in enumerate(source):
        assert (sources >= 0).any() or not got[t].any()
    names = issued(emulator, ops.UnpermuteTokens(), rows, source, weights)
    casts = 2 * (dtype == torch.float16)  # beside which the operator takes weights in 16 bits only
    assert names.count("aclnnMoeFinalizeRoutingV4") == bool(len(x)) and len(names) == (1 + casts if len(x) else 1)


@each_dtype
def test_infinity_stays_with_its_token(rng, dtype):
    """Token 0 overflowed in every row of its own; token 1 shares none of them, token 2 has no expert here."""
    rows = random(rng, 9, 4, dtype=dtype)
    rows[0], rows[2], rows[4:] = math.inf, math.nan, math.nan
    source = torch.tensor([[0, -1, 2], [-1, 1, 3], [-1, -1, -1]], dtype=torch.int32)
    (got,) = verify(ops.UnpermuteTokens(), rows, source, torch.ones(3, 3))
    assert got[0].isnan().all() and got[1].isfinite().all() and not got[2].any()


def test_unpermuting_leaves_its_operands_alone(rng):
    rows, source = random(rng, 4, 6, dtype=torch.bfloat16), torch.tensor([[0, -1], [-1, 1]], dtype=torch.int32)
    given = [t.npu() for t in (rows, source, torch.ones(2, 2))]
    ask(ops.UnpermuteTokens(), *given)
    assert torch.equal(given[0].cpu(), rows) and torch.equal(given[1].cpu(), source) and given[2].cpu().all()


def referred(op, *operands, rank=0):
    return reference.TABLE.rules[type(op)](*operands, run=Run(rank), **fields(op))


@each_dtype
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_experts_from_end_to_end(rng, dtype, tokens):
    """Permute, two products round the activation, unpermute, on four ranks: unwritten rows are NaN all the way."""
    ranks, own, wide = 4, 2, torch.float32
    x, logits = random(rng, tokens, 16, dtype=dtype) / 2, random(rng, tokens, ranks * own, dtype=wide)
    gating = ops.GatingTopK(top_k=3, groups=1, top_groups=1)
    gate_up, down = random(rng, ranks * own, 24, 16, dtype=dtype) / 4, random(rng, ranks * own, 16, 12, dtype=dtype) / 4
    got, want = [], []
    for run, out, put in ((ask, got, to_device), (referred, want, lambda t: t.double())):
        weights, experts = run(gating, put(logits), put(torch.zeros(ranks * own)))
        for rank in range(ranks):
            mine = slice(rank * own, (rank + 1) * own)
            rows, counts, source = run(ops.PermuteTokens(own, Group("ep", ranks)), put(x), experts, rank=rank)
            (rows,) = run(ops.GroupedLinear(), rows, put(gate_up[mine]), counts)
            (rows,) = run(ops.Swiglu(), rows)
            (rows,) = run(ops.GroupedLinear(), rows, put(down[mine]), counts)
            out += run(ops.UnpermuteTokens(), rows, source, weights)
    for ours, exactly in zip(got, want, strict=True):
        several = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
        torch.testing.assert_close(ours.cpu().double(), exactly, rtol=0, atol=several)


# --- refusals -------------------------------------------------------------------------


def test_routing_of_too_many_experts():
    op = ops.PermuteTokens(5121, Group("ep", 2))
    why = refused(op, torch.zeros(1, 4), torch.zeros(1, 2, dtype=torch.int32))
    assert why == "permute_tokens: experts: routing on ascend takes at most 10240 over all ranks: got 10242"


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ((1025, 1, 1), "experts: .* 1 to 1024 a rank: got 1025"),
        ((2, 1, 65536), "D: .* 1 to 65535 features: got 65536"),
        ((2, 65536, 1), "F: .* 1 to 65535 features: got 65536"),
    ],
    ids=str,
)
def test_grouped_products_of_too_large_sizes(weight, message):
    rows, counts = torch.zeros(3, weight[2]), torch.zeros(weight[0], dtype=torch.int64)
    assert re.search(message, refused(ops.GroupedLinear(), rows, torch.zeros(weight), counts))


def test_unpermuting_in_a_dtype_that_the_operator_does_not_take():
    given = torch.zeros(2, 1).double(), torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2).double()
    why = refused(ops.UnpermuteTokens(), *given)
    assert why == "unpermute_tokens: rows: on ascend must be bf16, fp16 or fp32: got fp64"


@pytest.mark.parametrize("index", [[0, 1, 1, 2], [0, 1, 2, -1], [0, 1, 2, 4]], ids=str)
def test_an_index_that_is_no_permutation_is_a_fault(emulator, index):
    rows = torch.ones(4, 8).npu()
    with pytest.raises(RuntimeError, match="sorted_indices"):
        npu.npu_moe_token_unpermute(rows, torch.tensor(index, dtype=torch.int32).npu(), torch.ones(2, 2).npu())
        emulator.synchronize()


@pytest.mark.parametrize(("mode", "index"), [(3, [0, 1, -2, 1]), (3, [0, 1, 2, 4]), (2, [0, 1, 2, -1])], ids=str)
def test_an_index_of_no_row_is_a_fault(emulator, mode, index):
    """Every other index is right: a row may serve two pairs, and -1 is a pair that was dropped where pairs are."""
    rows, scales = torch.ones(4, 8).npu(), torch.ones(2, 2).npu()
    for given in ([0, 1, 1, 2], index):
        pairs, room = torch.tensor(given, dtype=torch.int32).npu(), rows.unsqueeze(0) if mode == 3 else rows
        out = npu.npu_moe_finalize_routing(room, None, None, None, scales, pairs, None, drop_pad_mode=mode)
        if given != index:
            assert out.cpu().eq(2).all()
    with pytest.raises(RuntimeError, match="expanded_row_idx"):
        emulator.synchronize()


def test_cpu_and_ascend_route_alike(rng):
    """Sizes of a decode step: 64 tokens, 8 of 256 experts, one of 8 ranks."""
    logits, bias = gate(rng, 64, 256)
    _, experts = on_device(V3, logits, bias)
    x, op = random(rng, 64, 8, dtype=torch.bfloat16), ops.PermuteTokens(32, Group("ep", 8))
    (rows, counts, source), (want, numbers, places) = (
        on_device(op, x, experts, rank=3),
        cpu.TABLE.rules[ops.PermuteTokens](x, experts, run=Run(3), **fields(op)),
    )
    here = int(counts.sum())
    assert here and torch.equal(counts, numbers) and torch.equal(source, places)
    assert torch.equal(rows[:here], want[:here])
