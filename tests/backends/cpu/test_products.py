"""Products in 16 bits, with and without a processor that has them: both are the float64 product, rounded once."""

import pytest
import torch

from mla_fx.backends.cpu import products

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=[True, False], ids=["native", "widened"], autouse=True)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has", lambda dtype: request.param)
    monkeypatch.setattr(products, "PIECE", 64)


def close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether it is x . weight of float64 within a rounding of the dtype and those of sums in float32."""
    exact = x.double() @ weight.double()
    slack = (x.double().abs() @ weight.double().abs()) * 2**-20
    return bool(((found.double() - exact).abs() <= exact.abs() * torch.finfo(found.dtype).eps + slack).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, products.ROWS - 1, products.ROWS, 9])
@pytest.mark.parametrize(("features", "out"), [(16, 9), (100, 3), (7, 1), (1, 70)])
def test_linear(dtype: torch.dtype, rows: int, features: int, out: int) -> None:
    x, weight = torch.randn(rows, features).to(dtype), torch.randn(out, features).to(dtype)
    found = products.linear(x, weight)
    assert found.dtype == dtype and found.shape == (rows, out) and found.is_contiguous()
    assert close(found, x, weight.t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "rows", "features", "out"), [(5, 3, 4, 8), (3, 1, 20, 20), (1, 6, 2, 2), (2, 0, 4, 4)]
)
def test_batched(dtype: torch.dtype, heads: int, rows: int, features: int, out: int) -> None:
    x = torch.randn(rows, heads, features).to(dtype).transpose(0, 1)
    weight = torch.randn(heads, out, features).to(dtype).mT
    found = products.batched(x, weight)
    assert found.dtype == dtype and found.shape == (heads, rows, out)
    assert all(close(*each) for each in zip(found, x, weight, strict=True))
