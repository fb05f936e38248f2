"""What the tests of the ops do not ask of the CUDA rules: what only a GPU takes, chunks, tiles, and roundings.

The tests in `tests/ops` run every rule on tensors of the host, in every dtype.
The calls that CUDA has and a CPU has not are made here through stand-ins that
refuse what CUDA refuses.
"""

import math

import attrs
import numpy as np
import pytest
import torch

from mla_fx.backends import InProcess, Run, cuda, reference
from mla_fx.backends.common import current_attention
from mla_fx.backends.cuda import grouped_linear, history_attention
from mla_fx.backends.cuda.calls import experts, product
from mla_fx.effects import ops
from tests.backends.cuda.conftest import why_not
from tests.ops.conftest import TOLERANCE, fields

sixteen_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
#: Rows of every expert, and rows behind them.
COUNTS = [
    ([5], 0),
    ([0, 3, 0, 20, 1], 4),
    ([16, 32, 0], 0),
    ([17, 15, 1, 33], 7),
    ([0, 0], 5),
    ([1] * 40, 0),
    ([0] * 9 + [50], 14),
]


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def random(rng, *shape, dtype):
    return torch.as_tensor(rng.standard_normal(shape)).to(dtype)


def close(got, want):
    relative, absolute = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=relative, atol=absolute)


def ask(op, *operands, table=cuda.TABLE):
    return table.rules[type(op)](*operands, run=Run(), **fields(op))


def verify(op, *operands, rows=None):
    """The rule against the reference in float64, in the first `rows` rows."""
    got = ask(op, *operands)
    exact = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in operands]
    for ours, exactly in zip(got, ask(op, *exact, table=reference.TABLE), strict=True):
        close(ours[:rows], exactly[:rows])
    return got


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Products as CUDA has them: of 16 bits, where asked for a float32 result, else with sums in 16 bits."""
    mm, bmm = torch.mm, torch.bmm

    def asked(multiply):
        def call(x, y, *, out_dtype):
            assert out_dtype == torch.float32 and x.dtype == y.dtype and x.dtype.itemsize == 2
            return multiply(x.float(), y.float())

        return call

    def reduced(x, y):
        """The worst that cuBLAS may do by default."""
        assert x.dtype == y.dtype
        return sum(x[..., k : k + 1] * y[..., k : k + 1, :] for k in range(x.shape[-1]))

    monkeypatch.setattr(product, "widens", lambda x: x.dtype.itemsize == 2)
    monkeypatch.setattr(torch, "mm", asked(mm))
    monkeypatch.setattr(torch, "bmm", asked(bmm))
    monkeypatch.setattr(torch, "matmul", reduced)


@sixteen_bits
def test_sums_are_in_float32_on_a_gpu(like_a_gpu, rng, dtype):
    verify(ops.Linear(), random(rng, 3, 40, dtype=dtype), random(rng, 5, 40, dtype=dtype))
    verify(ops.AbsorbQuery(rope=4), random(rng, 3, 2 * 20, dtype=dtype), random(rng, 2, 16, 24, dtype=dtype))
    verify(ops.VUp(), random(rng, 3, 2, 24, dtype=dtype), random(rng, 2, 24, 16, dtype=dtype))
    verify(ops.GateLogits(), random(rng, 3, 40, dtype=dtype), random(rng, 6, 40, dtype=dtype))
    weight = random(rng, 2, 6, 40, dtype=dtype)
    verify(ops.GroupedLinear(), random(rng, 5, 40, dtype=dtype), weight, torch.tensor([2, 3]))


def test_grouped_product(monkeypatch, rng):
    """torch's own, which a CPU has too; here it may not see rows that are nobody's."""
    monkeypatch.setattr(grouped_linear, "grouped_product_takes", lambda rows, _: True)
    monkeypatch.setattr(grouped_linear, "by_tiles", None)
    rows, weight = random(rng, 9, 16, dtype=torch.bfloat16), random(rng, 4, 8, 16, dtype=torch.bfloat16)
    rows[7:] = math.nan
    verify(ops.GroupedLinear(), rows, weight, torch.tensor([3, 0, 1, 3]), rows=7)


@pytest.mark.parametrize(
    ("dtype", "shape", "capability", "taken"),
    [
        (torch.bfloat16, (4, 16, 64), 9, True),
        (torch.bfloat16, (4, 16, 64), 10, True),
        (torch.bfloat16, (4, 16, 64), 8, False),
        (torch.bfloat16, (4, 16, 64), 12, False),
        (torch.float16, (4, 16, 64), 9, False),
        (torch.bfloat16, (4, 16, 60), 9, False),
        (torch.bfloat16, (4, 12, 64), 9, False),
        (torch.bfloat16, (4, 0, 64), 9, False),
        (torch.bfloat16, (1024, 8, 8), 9, False),
    ],
)
def test_where_the_grouped_product_is_taken(monkeypatch, dtype, shape, capability, taken):
    """Elsewhere torch would read the counts on the host."""

    @attrs.frozen
    class Rows:
        dtype: torch.dtype
        is_cuda: bool = True
        device: str = "cuda:0"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    weight = torch.empty(shape, dtype=dtype)
    assert experts.grouped_product_takes(Rows(dtype), weight) is taken
    assert not experts.grouped_product_takes(Rows(dtype, is_cuda=False), weight)
    assert not experts.grouped_product_takes(Rows(dtype), torch.empty(shape, dtype=dtype).transpose(1, 2).mT[..., ::2])


@pytest.mark.parametrize(("counts", "behind"), COUNTS)
def test_tiles_are_of_one_expert_and_there_are_enough(counts, behind):
    total = sum(counts) + behind
    expert, takes, place = experts.cut(torch.tensor(counts), total)
    assert takes.shape == (len(expert), experts.ROWS) and place.shape == (total,)
    owner = [y for y, count in enumerate(counts) for _ in range(count)]
    for row, y in enumerate(owner):
        assert takes.flatten()[place[row]] == row
        assert expert[place[row] // experts.ROWS] == y
    assert len(set(place[: len(owner)].tolist())) == len(owner)
    assert takes.min() >= 0 and takes.max() < total


@pytest.mark.parametrize(("counts", "behind"), COUNTS)
@pytest.mark.parametrize("limit", [1, 3, 1 << 28])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_in_chunks(monkeypatch, rng, counts, behind, limit, dtype):
    """`limit` weights at a time, or all of them."""
    total, own = sum(counts) + behind, torch.tensor(counts)
    rows, weight = random(rng, total, 24, dtype=dtype), random(rng, len(counts), 8, 24, dtype=dtype)
    rows[sum(counts) :] = math.nan
    monkeypatch.setattr(experts, "BYTES", limit * weight[0].nbytes)
    verify(ops.GroupedLinear(), rows, weight, own, rows=sum(counts))
    whole = torch.as_tensor(rng.integers(-128, 128, weight.shape)).to(torch.int8)
    scale = random(rng, len(counts), 8, dtype=torch.float32).abs()
    # Integers of a step: quantised alike in float32 and float64, so that only sums and scaling are compared.
    exact = torch.as_tensor(rng.integers(-127, 128, rows.shape)).to(dtype)
    exact[:, 0] = 127
    verify(ops.QuantGroupedLinear(), exact, whole, scale, own, rows=sum(counts))


@pytest.mark.parametrize("features", [1023, 1025, 5000])
def test_integers_beyond_what_float32_counts(features):
    """All products of one sign: the sum of 5000 is odd and above 2^24, and comes out to the last unit."""
    rows = torch.full((3, features), 127.0, dtype=torch.float64)
    weight = torch.full((2, 4, features), -128, dtype=torch.int8)
    weight[1], weight[:, :, 0] = 127, 1
    ones = torch.ones(2, 4, dtype=torch.float64)
    (got,) = ask(ops.QuantGroupedLinear(), rows, weight, ones, torch.tensor([1, 2]))
    assert got[:, 0].tolist() == [127 - 127 * 128 * (features - 1)] + [127 + 127 * 127 * (features - 1)] * 2


@pytest.mark.parametrize("shape", [(1, 7168, 24), (16, 8, 8), (17, 9, 3), (3, 0, 5), (0, 16, 8), (40, 33, 17)])
def test_the_integer_product_is_given_what_cuda_takes(monkeypatch, rng, shape):
    tokens, features, out = shape
    multiply, asked = torch._int_mm, []

    def strict(x, y):
        assert x.shape[0] > 16 and x.shape[1] > 0 and x.shape[1] % 8 == 0 and y.shape[1] > 0 and y.shape[1] % 8 == 0
        assert x.is_contiguous() and y.t().is_contiguous()
        asked.append(x.shape)
        return multiply(x, y)

    monkeypatch.setattr(torch, "_int_mm", strict)
    weight = torch.as_tensor(rng.integers(-128, 128, (out, features))).to(torch.int8)
    verify(ops.QuantLinear(), random(rng, tokens, features, dtype=torch.float64), weight, torch.ones(out).double())
    assert len(asked) == 1


@sixteen_bits
def test_sixteen_bits_are_rounded_once(dtype):
    """A big product hides each small one in 16 bits, not their sum."""
    small, step = torch.finfo(dtype).eps / 4, 2 * torch.finfo(dtype).eps
    features = torch.tensor([1.0, *[small] * 8]).to(dtype)
    ones = torch.ones(2, 9, dtype=dtype)
    want = [1 + step] * 2
    for op, *operands in (
        (ops.Linear(), ones, features.view(1, 9)),
        (ops.VUp(), ones.view(2, 1, 9), features.view(1, 9, 1)),
        (ops.AbsorbQuery(rope=0), ones, features.view(1, 9, 1)),
        (ops.GroupedLinear(), ones, features.view(1, 1, 9), torch.tensor([2])),
    ):
        assert ask(op, *operands)[0].flatten().tolist() == want
    parts = [features[k].view(1, 1) for k in range(9)]
    assert [total.item() for total in InProcess(9).move("all_reduce", parts, group="tp")] == [1 + step] * 9
    source, weights = torch.arange(9, dtype=torch.int32).view(1, 9), torch.ones(1, 9)
    assert ask(ops.UnpermuteTokens(), features.view(9, 1), source, weights)[0].item() == 1 + step


@pytest.mark.parametrize("tile", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_history_in_tiles(monkeypatch, rng, tile, dtype):
    """Scores that rise and fall from tile to tile by more than an exponential can hold."""
    monkeypatch.setattr(history_attention, "TILE", tile)
    queries = [30 * random(rng, 4, 2, size, dtype=dtype) for size in (6, 4)]
    caches = [random(rng, 7, 4, size, dtype=dtype) for size in (6, 4)]
    table = torch.tensor([[3, 1, 6, 2**31 - 1], [2, 0, 5, 4]], dtype=torch.int32)
    caches[0][6, 1:] = math.nan  # behind the 9 keys of the first request
    verify(ops.HistoryAttention(4.0), *queries, *caches, table, (1, 2), (9, 16))


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_current_part_in_chunks(monkeypatch, rng, tokens):
    monkeypatch.setattr(current_attention, "HOST_TOKENS", tokens)
    queries = [random(rng, 12, 2, size, dtype=torch.float32) for size in (6, 4)]
    keys = [random(rng, 12, size, dtype=torch.float32) for size in (6, 4)]
    verify(ops.CurrentAttention(0.3), *queries, *keys, (1, 1, 1, 2, 2, 2, 0, 2))


@pytest.mark.parametrize("slots", [[-1, -1], [-1, 0, -1], [3, -1, 11, 0], [-1, 11], [0]], ids=str)
def test_tokens_without_a_slot_change_nothing(rng, slots):
    """Poison in their rows goes nowhere; a cache that nobody writes keeps its bits."""
    cache, rows = random(rng, 3, 4, 5, dtype=torch.float32), random(rng, len(slots), 5, dtype=torch.float32)
    want = cache.clone().flatten(0, 1)
    for slot, value in zip(slots, rows, strict=True):
        if slot < 0:
            value[:] = math.nan
        else:
            want[slot] = value
    ask(ops.WriteRows(), cache, rows, torch.tensor(slots))
    assert torch.equal(cache.flatten(0, 1), want)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@sixteen_bits
def test_experts_on_a_gpu(rng, dtype):
    """By tiles or by the grouped product, whichever this GPU has; sums of 2048 in float32."""
    rows, weight = random(rng, 50, 2048, dtype=dtype) / 45, random(rng, 4, 64, 2048, dtype=dtype)
    counts = torch.tensor([17, 0, 3, 25])
    (got,) = ask(ops.GroupedLinear(), rows.cuda(), weight.cuda(), counts.cuda())
    (want,) = ask(ops.GroupedLinear(), rows.double(), weight.double(), counts, table=reference.TABLE)
    close(got[:45].cpu(), want[:45])


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("count", [4, 37, 256])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_equal_logits_give_equal_scores_on_a_gpu(rng, count, scoring):
    op = ops.GatingTopK(top_k=count, scoring=scoring)
    for logit in rng.standard_normal(20):
        logits = torch.full((3, count), float(logit), device="cuda")
        weights, chosen = ask(op, logits, torch.zeros(count, device="cuda"))
        assert chosen.tolist() == [list(range(count))] * 3
        assert torch.equal(weights, weights[:1, :1].expand(3, count))
