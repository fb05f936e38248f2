"""Products of the CPU in each of their ways: the float64 product, rounded once; a row is the same in any batch."""

import pytest
import torch

from mla_fx.backends.cpu import products, quant_linear
from mla_fx.backends.table import Formed
from tests.cases import each

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WAYS = ("kernel", "torch", "torch, native", "oneDNN")
kernel = pytest.mark.skipif(not products.compiled(torch.float32), reason="no kernel here")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How products are computed, whatever is fastest here; oneDNN has no 16 bits everywhere, but packs float32."""
    chosen: str = request.param
    if chosen == "kernel" and not products.compiled(torch.float32):
        pytest.skip("no kernel here")
    monkeypatch.setattr(products, "compiled", lambda dtype: chosen == "kernel")
    monkeypatch.setattr(products, "has", lambda dtype: chosen == "torch, native")
    monkeypatch.setattr(products, "packs", lambda dtype: chosen == "oneDNN")
    monkeypatch.setattr(products, "PIECE", 64)
    return chosen


def keep(weight: torch.Tensor, way: str) -> Formed:
    if way == "oneDNN" and weight.dtype != torch.float32:
        pytest.skip("what oneDNN packs everywhere is float32")
    return products.packed(weight)


def close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether it is x . weight of float64, within D + 1 roundings of float32 for the sum and one of the dtype."""
    exact, size = x.double() @ weight.double(), x.double().abs() @ weight.double().abs()
    kind = torch.finfo(found.dtype)
    slack = (x.shape[-1] + 1) * 2.0**-24 * size + exact.abs() * kind.eps / 2 * 1.01 + kind.smallest_normal * kind.eps
    return bool(((found.double() - exact).abs() <= slack).all())


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_turn(count: int) -> torch.Tensor:
    """Rows of `count` experts: some, none, many, and again."""
    return torch.tensor([(2, 0, 9, 1, 100)[y % 5] for y in range(count)], dtype=torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype, way: str) -> None:
    for features, out in ((16, 9), (100, 32), (7, 16), (1, 80), (33, 1008), (0, 16), (5, 0), (600, 80)):
        weight = drawn(out, features, dtype=dtype)
        kept = keep(weight, way)
        for rows in (0, 1, products.ROWS - 1, 5, 9, 200):
            x = drawn(rows, features, dtype=dtype, seed=1)
            found = products.linear(x, kept)
            assert found.dtype == dtype and found.shape == (rows, out) and found.is_contiguous()
            assert close(found, x, weight.t()), (features, out, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped(dtype: torch.dtype, way: str) -> None:
    """All experts of a layer; what is behind the last count is neither read nor written."""
    for experts, features, out in ((1, 3, 16), (7, 20, 32), (5, 9, 5)):
        weight, counts = drawn(experts, out, features, dtype=dtype), in_turn(experts)
        rows = drawn(int(counts.sum()) + 3, features, dtype=dtype, seed=1)
        rows[-3:] = torch.nan
        kept = keep(weight, way)
        assert isinstance(kept, tuple) == (way == "oneDNN")
        (found,) = products.grouped([rows], [kept], [counts])
        assert found.dtype == dtype and found.shape == (len(rows), out)
        for mine, x, one in zip(
            found[:-3].split(counts.tolist()), rows[:-3].split(counts.tolist()), weight, strict=True
        ):
            assert close(mine, x, one.t()), (experts, features, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_heads(dtype: torch.dtype, way: str) -> None:
    """On features of a head that are not all of it, and with a weight of more heads, as ranks have them."""
    for heads, rows, features, out in ((5, 3, 4, 16), (3, 1, 20, 48), (1, 6, 2, 2), (2, 0, 4, 16), (16, 33, 128, 32)):
        x = drawn(rows, heads, features + 3, dtype=dtype)[..., :features]
        for weight in (
            drawn(heads + 2, features, out, dtype=dtype)[1:-1],
            drawn(heads, out, features, dtype=dtype).mT,
        ):
            (found,) = products.of_heads([x], [weight])
            assert found.dtype == dtype and found.shape == (rows, heads, out) and found.is_contiguous()
            for head in range(heads):
                assert close(found[:, head], x[:, head], weight[head]), (heads, rows, features, out)


@kernel
@each("dtype", DTYPES)
def test_panels_are_sixteen_features_side_by_side(dtype: torch.dtype) -> None:
    weight = drawn(3, 48, 35, dtype=dtype)
    assert torch.equal(products._panels(weight, 1), weight.view(3, 3, 16, 35).transpose(2, 3))
    integers = torch.randint(-128, 128, (2, 32, 38), dtype=torch.int8)
    panels = products._panels(integers, 2)
    assert torch.equal(panels, integers.view(2, 2, 16, 19, 2).transpose(2, 3))
    assert torch.equal(products.unpacked(panels), integers)


@kernel
@each("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_in_any_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: in batches of each number of rows that a tile has, and of more than are widened at a time.

    Depth is more than two pieces, and no whole number of them: one row has it in one, several piece after piece.
    """
    monkeypatch.setattr(products, "compiled", lambda dtype: True)
    x, weight, up = drawn(260, 549, dtype=dtype), drawn(176, 549, dtype=dtype), drawn(2, 549, 176, dtype=dtype)
    kept, both = products.packed(weight), torch.stack([x, x.flip(1)], 1)
    whole, (heads,) = products.linear(x, kept), products.of_heads([both], [up])
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 193):
        assert torch.equal(products.linear(x[:rows], kept), whole[:rows])
        assert torch.equal(products.linear(x[-rows:], kept), whole[-rows:])
        assert torch.equal(products.of_heads([both[-rows:]], [up])[0], heads[-rows:])
    counts = torch.tensor([3, 0, 90])
    (mine,) = products.grouped([torch.cat([x[:3], x[:90]])], [torch.stack([kept] * 3)], [counts])
    assert torch.equal(mine, torch.cat([whole[:3], whole[:90]]))


@kernel
def test_threads_change_no_bit() -> None:
    x, weight, counts = drawn(126, 64), drawn(8, 208, 64), torch.tensor([1, 0, 90, 3, 0, 7, 2, 20])
    kept, before = products._panels(weight, 1), torch.get_num_threads()
    alone = products.grouped([x], [kept], [counts])[0][:123]
    try:
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(products.grouped([x], [kept], [counts])[0][:123], alone)
    finally:
        torch.set_num_threads(before)


def test_what_is_no_number_stays_where_it_is(way: str) -> None:
    """A NaN of a row is in that row alone, one of the weight in its feature alone; an infinity comes through."""
    x, weight = drawn(9, 20), drawn(48, 20)
    x[4, 3], x[2, 1], weight[17, 5] = torch.nan, torch.inf, torch.nan
    found = products.linear(x, keep(weight, way))
    right = torch.zeros(9, 48, dtype=torch.bool)
    right[4], right[:, 17] = True, True
    assert torch.equal(found.isnan(), right)
    assert torch.equal(found[2].isinf(), ~right[2])


@kernel
def test_sixteen_bits_are_rounded_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sum of two floats: to even, over the largest number, below the smallest, and what is no number."""
    monkeypatch.setattr(products, "compiled", lambda dtype: True)
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 1e-39, 65520.0, 6e-8, -0.0, torch.inf, torch.nan])
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = values.to(dtype)[:, None], torch.ones(16, 1, dtype=dtype)
        x = torch.cat([x, x * 2**-9], 1)
        right = (x[:, 0].float() + x[:, 1].float()).to(dtype)
        found = products.linear(x, products.packed(weight.repeat(1, 2)))
        assert torch.equal(found.nan_to_num(7), right.nan_to_num(7)[:, None].expand(-1, 16))


@kernel
@each("dtype", DTYPES)
def test_quantized_is_the_plain_way_bit_for_bit(dtype: torch.dtype) -> None:
    """The same steps, integers, exact sums and roundings; with rows of zeros, NaN and infinity, and experts."""
    weight, scale = torch.randint(-128, 128, (3, 48, 1034), dtype=torch.int8), drawn(3, 48, seed=2).abs()
    panels = products._panels(weight, 2)
    for rows in (0, 1, 2, 7, 200):
        x = drawn(rows, 1034, dtype=dtype) * 3
        if rows > 6:
            x[1], x[2, 5], x[3, 4], x[5] = 0, torch.nan, -torch.inf, x[5] * 1e-4
        (found,) = products.quantized([x], [panels[1]], [scale[1]], None)
        right = quant_linear.plain(x, weight[1], scale[1])
        assert torch.equal(found.nan_to_num(7), right.nan_to_num(7)) and found.dtype == dtype
    counts = torch.tensor([40, 0, 50])
    found = products.quantized([x], [panels], [scale], [counts])[0][:90]
    right = [quant_linear.plain(x[:40], weight[0], scale[0]), quant_linear.plain(x[40:90], weight[2], scale[2])]
    assert torch.equal(found.nan_to_num(7), torch.cat(right).nan_to_num(7))
