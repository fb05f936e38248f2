"""`ops.HistoryAttention`: queries of all heads over a paged shard, everything else poisoned."""

import math

import numpy as np
import pytest
import torch

from mla_fx.backends.cpu import history_attention
from mla_fx.effects import Aval, InputError, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided
from tests.oracles import attend

SCALE = 0.3
SENSE = {"scale": SCALE, "workspace": "mine"}
NONSENSE = {"scale": (0, -0.3, math.nan, math.inf, "1", None, True), "workspace": ("", "two words", None, 7)}
LATENT, ROPE = 6, 4
# query lengths, history lengths, tokens, block size
CASES = [
    ((1,), (5,), 1, 4),
    ((1, 1, 1), (3, 0, 9), 4, 4),
    ((2, 0, 3), (1, 7, 8), 6, 4),
    ((0, 0), (3, 4), 2, 4),
    ((8,), (17,), 8, 1),
    ((1, 2), (0, 0), 3, 2),
    ((3, 1), (33, 40), 4, 32),
    ((), (), 0, 4),
]


class Shard:
    """Requests laid out in a cache block by block; rows, blocks and table entries nobody needs are poison."""

    def __init__(self, rules, rng, query, history, tokens, size, *, heads=3, shuffled=True, latent=LATENT, rope=ROPE):
        need = [-(-keys // size) for keys in history]
        order = rng.permutation(sum(need) + 2) if shuffled else np.arange(sum(need) + 2)
        self.q_latent, self.q_rope = rules.random(rng, tokens, heads, latent), rules.random(rng, tokens, heads, rope)
        self.latent_cache = rules.tensor(np.full((len(order), size, latent), math.nan))
        self.rope_cache = rules.tensor(np.full((len(order), size, rope), math.nan))
        self.table = torch.full((len(history), max(need, default=0) + 2), 2147480000, dtype=torch.int32)
        self.query, self.history, self.keys = query, history, []
        first = 0
        for b, keys in enumerate(history):
            own = order[first : first + need[b]]
            first += need[b]
            self.table[b, : need[b]] = torch.as_tensor(own)
            at = [(own[j // size], j % size) for j in range(keys)]
            parts = rules.random(rng, keys, latent), rules.random(rng, keys, rope)
            for cache, rows in zip((self.latent_cache, self.rope_cache), parts, strict=True):
                for place, row in zip(at, rows, strict=True):
                    cache[place] = row
            self.keys.append(list(zip(*(exact(part).tolist() for part in parts), strict=True)))
        self.q_latent[sum(query) :] = math.nan  # padding

    def operands(self, layout=lambda t: t):
        tensors = (self.q_latent, self.q_rope, self.latent_cache, self.rope_cache, self.table)
        return (*map(layout, tensors), self.query, self.history)

    def oracle(self, scale=SCALE):
        hist, lse = np.zeros(self.q_latent.shape), np.full(self.q_latent.shape[:2], -math.inf)
        q_latent, q_rope = exact(self.q_latent).tolist(), exact(self.q_rope).tolist()
        request = [b for b, new in enumerate(self.query) for _ in range(new)]
        for t, b in enumerate(request):
            for h in range(hist.shape[1]):
                hist[t, h], lse[t, h] = attend(q_latent[t][h], q_rope[t][h], self.keys[b], scale)
        return hist, lse


def run(rules, shard, layout=lambda t: t):
    hist, lse = rules(ops.HistoryAttention(SCALE), *shard.operands(layout))
    assert lse.dtype == rules.wide
    want, want_lse = shard.oracle()
    rules.close(hist, want)
    rules.close(lse, want_lse)


@each("case", CASES)
@each("shuffled", [True, False])
def test_history_attention(rules, rng, case, shuffled):
    run(rules, Shard(rules, rng, *case, shuffled=shuffled))


@each("case", CASES)
@each("shuffled", [True, False])
@each("tile", [1, 4, 8])
def test_any_tile(rules, rng, monkeypatch, case, shuffled, tile):
    """Of the plain form; the kernel's are in `tests/backends/cpu/test_kernel_attention.py`."""
    monkeypatch.setattr(history_attention.attention, "serves", lambda *_: False)
    monkeypatch.setattr(history_attention, "TILE", tile)
    run(rules, Shard(rules, rng, *case, shuffled=shuffled))


@each(("heads", "tiles"), [(1, 1), (16, 1), (2, 2)])
@each("shuffled", [True, False])
def test_more_keys_than_a_tile(rules, rng, monkeypatch, heads, tiles, shuffled):
    monkeypatch.setattr(history_attention.attention, "serves", lambda *_: False)
    keys = tiles * history_attention.TILE + 5
    run(rules, Shard(rules, rng, (1,), (keys,), 1, 128, heads=heads, shuffled=shuffled))


@each("case", CASES)
def test_strided_operands(rules, rng, case):
    run(rules, Shard(rules, rng, *case), strided)


def test_operands_stay_as_they_were(rules, rng):
    shard = Shard(rules, rng, (1, 2), (5, 3), 3, 4)
    before = [t.clone() for t in shard.operands()[:5]]
    run(rules, shard)
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(before, shard.operands(), strict=False))


@each("tile", [4, 512])
def test_scores_in_the_tens_of_thousands(rules, rng, monkeypatch, tile):
    """From tile to tile scores rise and fall by more than an exponential can hold."""
    if tile == 4:
        monkeypatch.setattr(history_attention.attention, "serves", lambda *_: False)
    monkeypatch.setattr(history_attention, "TILE", tile)
    shard = Shard(rules, rng, (1, 1), (9, 1), 2, 4)
    shard.q_latent *= 2e4
    hist, lse = rules(ops.HistoryAttention(SCALE), *shard.operands())
    assert hist.isfinite().all()
    want = shard.oracle()[1]
    assert abs(want).max() > 9000
    np.testing.assert_allclose(lse.numpy(), want, rtol=1e-12 if rules.wide == torch.float64 else 2e-6)


def test_nan_in_a_key_that_is_seen_is_seen(rules, rng):
    """Only the request it belongs to: poison is selected away, not washed out."""
    shard = Shard(rules, rng, (1, 1), (5, 3), 2, 4)
    shard.latent_cache[shard.table[0, 1], 0] = math.nan
    hist, lse = rules(ops.HistoryAttention(SCALE), *shard.operands())
    assert hist[0].isnan().all() and lse[0].isnan().all()
    assert hist[1].isfinite().all() and lse[1].isfinite().all()


def avals(**changed):
    given = {
        "q_latent": Aval((4, 16, 512), "bf16"),
        "q_rope": Aval((4, 16, 64), "bf16"),
        "latent_cache": Aval((9, 128, 512), "bf16"),
        "rope_cache": Aval((9, 128, 64), "bf16"),
        "block_table": Aval((2, 3), "int32"),
        "query_lengths": Aval((2,), "int64"),
        "history_lengths": Aval((2,), "int64"),
    }
    return given | changed


def test_shapes():
    op = ops.HistoryAttention(SCALE)
    assert tuple(avals()) == tuple(op.operands)
    for dtype, lse in (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")):
        given = [aval.with_float(dtype) for aval in avals().values()]
        assert op.infer(*given) == (Aval((4, 16, 512), dtype), Aval((4, 16), lse))


@pytest.mark.parametrize(
    ("operand", "aval", "message"),
    [
        ("q_rope", Aval((5, 16, 64), "bf16"), r"axis T .* 4 in q_latent, 5 in q_rope"),
        ("q_rope", Aval((4, 8, 64), "bf16"), r"axis H .* 16 in q_latent, 8 in q_rope"),
        ("latent_cache", Aval((9, 128, 64), "bf16"), r"axis L .* 512 in q_latent, 64 in latent_cache"),
        ("rope_cache", Aval((9, 64, 64), "bf16"), r"axis S .* 128 in latent_cache, 64 in rope_cache"),
        ("rope_cache", Aval((8, 128, 64), "bf16"), r"axis C .* 9 in latent_cache, 8 in rope_cache"),
        ("rope_cache", Aval((9, 128, 32), "bf16"), r"axis R .* 64 in q_rope, 32 in rope_cache"),
        ("history_lengths", Aval((3,), "int64"), r"axis B .* 2 in block_table, 3 in history_lengths"),
        ("latent_cache", Aval((9, 128, 512), "fp16"), r"latent_cache must have the dtype of q_latent, bf16: got fp16"),
        ("block_table", Aval((2, 3), "int64"), r"block_table must be int32: got int64"),
        ("query_lengths", Aval((2,), "int32"), r"query_lengths must be int64: got int32"),
    ],
)
def test_shapes_that_are_refused(operand, aval, message):
    with pytest.raises(ShapeError, match="history_attention: " + message):
        ops.HistoryAttention(SCALE).infer(*avals(**{operand: aval}).values())


def check_values(query=(1, 2), history=(129, 3), table=((0, 8, 99), (4, -5, 99))):
    values = {"query_lengths": query, "history_lengths": history, "block_table": np.array(table, dtype=np.int32)}
    ops.HistoryAttention(SCALE).value_rule(avals(), values)


def test_values_that_are_accepted():
    check_values()
    check_values(query=(0, 0), history=(0, 0), table=[[2147480000] * 3] * 2)
    check_values(query=(4, 0), history=(384, 0), table=((0, 0, 8), (-1, -1, -1)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"query": (-1, 2)}, r"query_lengths: each must be at least 0: got \(-1, 2\)"),
        ({"query": (2, 3)}, r"query_lengths: the sum must be at most T = 4 tokens: got 5"),
        ({"history": (129, 385)}, r"history_lengths: each must be in 0\.\.384 \(3 columns .* 128 a block\): got .*385"),
        ({"history": (-1, 3)}, r"history_lengths: each must be in 0\.\.384 .*: got .*-1"),
        ({"history": (257, 3)}, r"block_table\[0, 2\]: must be in 0\.\.8, since history_lengths\[0\] is 257: got 99"),
        ({"history": (1, 129)}, r"block_table\[1, 1\]: must be in 0\.\.8, since history_lengths\[1\] is 129: got -5"),
    ],
)
def test_values_that_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        check_values(**values)
