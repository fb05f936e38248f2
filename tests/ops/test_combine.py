"""`ops.Combine`: all partials of a head in one normalisation."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided
from tests.oracles import attend

SENSE = {"flat": True}
NONSENSE = {"flat": (1, 0, None, "True")}
#: How a part says that it saw no key: as the logarithm of an empty sum, or as FlashMLA does.
NONE = (-math.inf, math.inf)
each_none = each("none", NONE)
#: For comparing two merges of the same partials, each with its own roundings.
CLOSE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5, torch.float64: 1e-12}


def oracle(out, lse, local, local_lse):
    """Row by row, over the contributions that saw a key."""
    merged = np.zeros(local.shape)
    for t, n in np.ndindex(*local.shape[:2]):
        pairs = [*zip(out[:, t, n], lse[:, t, n], strict=True), (local[t, n], local_lse[t, n])]
        seen = [(o, x) for o, x in pairs if not math.isinf(x)]
        if seen:
            m = max(x for _, x in seen)
            w = [math.exp(x - m) for _, x in seen]
            merged[t, n] = sum(a * o for a, (o, _) in zip(w, seen, strict=True)) / math.fsum(w)
    return merged


class Partials:
    """W history partials and the local one."""

    def __init__(self, rules, rng, ranks, tokens, heads, latent, spread=2.0):
        shape = (tokens, heads)
        self.rules = rules
        self.out = rules.random(rng, ranks, *shape, latent)
        self.lse = rules.random(rng, ranks, *shape, dtype=rules.wide) * spread
        self.local = rules.random(rng, *shape, latent)
        self.local_lse = rules.random(rng, *shape, dtype=rules.wide) * spread

    def merge(self, layout=lambda t: t):
        return self.rules(ops.Combine(), *map(layout, (self.out, self.lse, self.local, self.local_lse)))[0]

    def verify(self, layout=lambda t: t):
        self.rules.close(self.merge(layout), oracle(*map(exact, (self.out, self.lse, self.local, self.local_lse))))


def same(got, want):
    np.testing.assert_allclose(exact(got), exact(want), rtol=CLOSE[got.dtype], atol=CLOSE[got.dtype])


@each("shape", [(1, 1, 1, 1), (2, 3, 2, 5), (4, 2, 1, 512), (8, 1, 16, 8), (3, 0, 2, 4), (2, 2, 2, 129)])
@each("layout", [torch.clone, strided])
def test_combine(rules, rng, shape, layout):
    Partials(rules, rng, *shape).verify(layout)


@each("shape", [(2, 3, 2, 5), (3, 0, 2, 4), (4, 1, 1, 8)])
def test_flat(rules, rng, shape):
    """Heads side by side: the same numbers in the same order."""
    p = Partials(rules, rng, *shape)
    (flat,) = rules(ops.Combine(flat=True), p.out, p.lse, p.local, p.local_lse)
    assert torch.equal(flat, p.merge().flatten(1))


@each_none
@each("unseen", ["source", "all sources", "local", "rows", "everything"])
def test_a_part_that_saw_no_key_never_reaches_the_result(rules, rng, unseen, none):
    p = Partials(rules, rng, 3, 2, 2, 5)
    none, empty = p.lse.new_tensor(none), p.local.new_tensor(math.nan)
    if unseen in ("source", "rows"):
        where = (slice(1, 2),) if unseen == "source" else ([0, 1, 2, 2], [0, 1, 0, 1], [1, 1, 1, 0])
        p.lse[where], p.out[where] = none, empty
    if unseen in ("all sources", "everything"):
        p.lse[:], p.out[:] = none, empty
    if unseen in ("local", "everything"):
        p.local_lse[:], p.local[:] = none, empty
    p.verify()
    if unseen == "everything":
        assert torch.equal(p.merge(), torch.zeros_like(p.local))


@each_none
def test_infinite_output_of_an_empty_shard(rules, rng, none):
    p = Partials(rules, rng, 2, 1, 1, 3)
    p.lse[0], p.out[0] = none, math.inf
    p.verify()


def test_both_infinities_in_one_row(rules, rng):
    p = Partials(rules, rng, 2, 1, 1, 3)
    p.lse[:, 0, 0], p.out[:] = p.lse.new_tensor(NONE), math.nan
    assert torch.equal(p.merge(), p.local)
    p.local_lse[:], p.local[:] = math.inf, math.nan
    assert torch.equal(p.merge(), torch.zeros_like(p.local))


@each("where", ["source", "local"])
@each("others", [None, *NONE])
def test_nan_in_an_lse_is_not_hidden(rules, rng, where, others):
    p = Partials(rules, rng, 2, 2, 1, 3)
    if others is not None:
        p.lse[:], p.local_lse[:] = others, others
    (p.lse[1] if where == "source" else p.local_lse)[0] = math.nan
    merged = p.merge()
    assert merged[0].isnan().all()
    assert merged[1].isfinite().all()


def test_nan_of_a_part_that_counts_is_not_hidden(rules, rng):
    p = Partials(rules, rng, 2, 1, 1, 3)
    p.out[0, 0, 0, 1] = math.nan
    assert p.merge().isnan().tolist() == [[[False, True, False]]]


@each("lse", [70000.25, 65504.0, -7e4, 3e38, 1e-30, 1e-45, 0.0])
def test_lse_of_any_size(rules, rng, lse):
    """Neighbours of a large LSE differ by what float32 can still tell, and that difference weighs."""
    p = Partials(rules, rng, 3, 1, 2, 4)
    p.lse[:], p.local_lse[:] = lse, lse
    if abs(lse) < 1e6:
        p.lse[0] += 0.25
        p.lse[1] -= 0.5
    p.verify()


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), ranks=st.integers(1, 8), tokens=st.integers(1, 3), seed=st.integers(0, 999))
def test_properties(rules, data, ranks, tokens, seed):
    """Order of sources, a source that saw nothing, a common shift, local and a source swapped: nothing changes."""
    p = Partials(rules, np.random.default_rng(seed), ranks, tokens, 2, 4)
    for s in data.draw(st.sets(st.integers(0, ranks - 1))):
        p.lse[s], p.out[s] = data.draw(st.sampled_from(NONE)), math.nan
    merged = p.merge()
    p.verify()

    order = data.draw(st.permutations(range(ranks)))
    p.out, p.lse = p.out[order], p.lse[order]
    same(p.merge(), merged)

    p.out = torch.cat([p.out, torch.full_like(p.out[:1], math.nan)])
    p.lse = torch.cat([p.lse, torch.full_like(p.lse[:1], -math.inf)])
    same(p.merge(), merged)

    source = data.draw(st.integers(0, ranks))
    for mine, theirs in ((p.local, p.out), (p.local_lse, p.lse)):
        kept = mine.clone()
        mine.copy_(theirs[source])
        theirs[source] = kept
    same(p.merge(), merged)

    shift = data.draw(st.sampled_from([-64.0, 0.5, 1024.0]))  # float32 keeps 1e-4 of an LSE beside 1024
    p.lse, p.local_lse = p.lse + shift, p.local_lse + shift
    atol = max(CLOSE[merged.dtype], 1e-3 if rules.wide == torch.float32 else 1e-11)
    np.testing.assert_allclose(exact(p.merge()), exact(merged), rtol=0, atol=atol)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), keys=st.integers(1, 9), ranks=st.integers(1, 5), seed=st.integers(0, 999))
def test_any_split_of_the_keys_is_the_whole(rules, data, keys, ranks, seed):
    """Keys dealt over sources and the local part, some of which get none, against softmax over all of them."""
    rng = np.random.default_rng(seed)
    key = [(rng.standard_normal(4), rng.standard_normal(2)) for _ in range(keys)]
    q, r = rng.standard_normal(4), rng.standard_normal(2)
    owner = data.draw(st.lists(st.integers(0, ranks), min_size=keys, max_size=keys))
    parts = [attend(q, r, [k for k, o in zip(key, owner, strict=True) if o == i], 0.7) for i in range(ranks + 1)]
    outs = [out if lse > -math.inf else [math.nan] * 4 for out, lse in parts]
    p = Partials(rules, rng, ranks, 1, 1, 4)
    p.out, p.local = rules.tensor(outs[:ranks]).view(-1, 1, 1, 4), rules.tensor(outs[ranks]).view(1, 1, 4)
    lse = rules.tensor([lse for _, lse in parts], rules.wide)
    p.lse, p.local_lse = lse[:ranks].view(-1, 1, 1), lse[ranks:].view(1, 1)
    want, _ = attend(q, r, key, 0.7)
    tolerance = 3 * CLOSE[p.local.dtype]  # the partials were rounded, too
    np.testing.assert_allclose(exact(p.merge())[0, 0], want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "lse"), [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")])
def test_shapes(dtype, lse):
    recv, recv_lse = Aval((8, 4, 16, 512), dtype), Aval((8, 4, 16), lse)
    local, local_lse = Aval((4, 16, 512), dtype), Aval((4, 16), lse)
    assert ops.Combine().infer(recv, recv_lse, local, local_lse) == (local,)
    assert ops.Combine(flat=True).infer(recv, recv_lse, local, local_lse) == (Aval((4, 16 * 512), dtype),)


@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
@pytest.mark.parametrize(
    ("operand", "shape", "kind", "message"),
    [
        ("recv", (8, 4, 16, 514), None, "axis L .* 514 in recv, 512 in local"),
        ("recv_lse", (7, 4, 16), None, "axis W .* 8 in recv, 7 in recv_lse"),
        ("recv_lse", (8, 4, 16), "int64", "recv_lse must be {wide}, to go with recv, {dtype}: got int64"),
        ("local", (3, 16, 512), None, "axis T .* 4 in recv, 3 in local"),
        ("local", (4, 16, 512), "fp32", "local must have the dtype of recv, {dtype}: got fp32"),
        ("local_lse", (4, 8), None, "axis N .* 16 in recv, 8 in local_lse"),
        ("local_lse", (4, 16), "fp16", "local_lse must be {wide}, to go with recv, {dtype}: got fp16"),
    ],
)
def test_shapes_that_are_refused(dtype, operand, shape, kind, message):
    wide = "fp64" if dtype == "fp64" else "fp32"
    given = {
        "recv": Aval((8, 4, 16, 512), dtype),
        "recv_lse": Aval((8, 4, 16), wide),
        "local": Aval((4, 16, 512), dtype),
        "local_lse": Aval((4, 16), wide),
    }
    given[operand] = Aval(shape, kind or given[operand].dtype)
    with pytest.raises(ShapeError, match="^combine: " + message.format(dtype=dtype, wide=wide)):
        ops.Combine().infer(*given.values())
