"""Common operators on the emulated device, against the same call of torch on the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("emulator")

#: Everything that torch should be able to do with floats, [3, 4] numbers in front, where an NPU can.
FLOATS: dict[str, Callable[[torch.Tensor], Any]] = {
    "abs": torch.abs,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "floor": torch.floor,
    "gelu": functional.gelu,
    "log": lambda x: torch.log(x.abs() + 1),
    "log10": lambda x: torch.log10(x.abs() + 1),
    "log1p": lambda x: torch.log1p(x.abs()),
    "log2": lambda x: torch.log2(x.abs() + 1),
    "neg": torch.neg,
    "reciprocal": torch.reciprocal,
    "relu": torch.relu,
    "round": torch.round,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "silu": functional.silu,
    "sin": torch.sin,
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "tanh": torch.tanh,
    "trunc": torch.trunc,
    "in place": lambda x: x.clone().exp_().tanh_().mul_(2).add_(1, alpha=0.5).clamp_(min=0.5),
    "pow": lambda x: (x**2, x.abs() ** x, 2**x),
    "remainder": lambda x: (torch.remainder(x, 0.75), torch.fmod(x, 0.75), torch.remainder(x, x.flip(0))),
    "true, floor and trunc quotients": lambda x: [torch.div(x, 0.4, rounding_mode=m) for m in (None, "floor", "trunc")],
    "quotients of tensors": lambda x: [torch.div(x, x.roll(1), rounding_mode=m) for m in (None, "floor", "trunc")],
    "add, sub, mul": lambda x: (x + x.t().t(), x - 1, 1 - x, x * x, 3 * x, torch.sub(x, x, alpha=2)),
    "addcmul, addcdiv": lambda x: (torch.addcmul(x, x, x, value=0.5), torch.addcdiv(x, x, x.abs() + 1, value=0.5)),
    "lerp": lambda x: (torch.lerp(x, x * 2, 0.25), torch.lerp(x, x * 2, x.abs())),
    "maximum, minimum": lambda x: (torch.maximum(x, -x), torch.minimum(x, -x)),
    "clamp": lambda x: (x.clamp(-0.5, 0.5), x.clamp(min=0.1), x.clamp(max=0.1), x.clamp(-x.abs(), x.abs() / 2)),
    "clamp_min, clamp_max": lambda x: (torch.clamp_min(x, 0.1), torch.clamp_max(x, 0.1)),
    "where": lambda x: (torch.where(x > 0, x, -x), torch.where(x > 0, x, 0.5)),
    "comparisons": lambda x: (x < 0.5, x <= 0.5, x > 0.5, x >= 0.5, x == 0.5, x != 0.5),
    "comparisons of tensors": lambda x: (x < -x, x <= -x, x > -x, x >= -x, x == x.flip(0), x != x.flip(0)),
    "isfinite, isnan, isinf": lambda x: (torch.isfinite(x / 0 * 0), torch.isnan(x / 0 * 0), torch.isinf(x / 0)),
    "isposinf, isneginf": lambda x: (torch.isposinf(x / 0), torch.isneginf(x / 0)),
    "nan_to_num": lambda x: torch.nan_to_num(torch.cat((x / 0, x * 0 / 0)), 1.0, 2.0, 3.0),
    "isclose, allclose, equal": lambda x: (
        torch.isclose(x, x + 1e-3, atol=1e-2),
        torch.tensor([torch.allclose(x, x + 1), torch.equal(x, x.clone()), torch.equal(x, x + 1)]),
    ),
    "sums": lambda x: (x.sum(), x.sum(1), x.sum((0, 1), keepdim=True), x.mean(), x.mean(0)),
    "products": lambda x: (x.prod(), x.prod(1)),
    "largest and smallest": lambda x: (x.max(), x.min(), *x.max(1), *x.min(0), x.amax(1), x.amin((0, 1))),
    "arguments": lambda x: (x.argmax(1), x.argmin(0), x.argmax()),
    "all, any": lambda x: ((x > -9).all(), (x > 0).any(1), (x > 9).any()),
    "softmax": lambda x: (x.softmax(1), torch.log_softmax(x, 0), torch.logsumexp(x, 1)),
    "cumsum": lambda x: x.cumsum(1),
    "norms": lambda x: (torch.linalg.vector_norm(x), x.norm(dim=1), torch.linalg.vector_norm(x, 1, dim=0)),
    "sort": lambda x: (*x.sort(dim=1), *x.sort(dim=0, descending=True, stable=True), x.argsort(1)),
    "topk": lambda x: (*x.topk(2), *x.topk(2, dim=0, largest=False)),
    "products of matrices": lambda x: (
        x @ x.t(),
        torch.mv(x, x[0]),
        torch.dot(x[0], x[1]),
        torch.addmm(x[:, :3], x, x.t(), beta=0.5, alpha=2),
        torch.bmm(x.expand(2, 3, 4), x.t().expand(2, 4, 3)),
        torch.baddbmm(x[:, :3].expand(2, 3, 3), x.expand(2, 3, 4), x.t().expand(2, 4, 3)),
        functional.linear(x, x, x[:, 0]),
    ),
    "shapes": lambda x: (torch.cat((x, x), 1), torch.stack((x, x)), x.repeat(2, 3), x.flip(1), x.roll(1, 0)),
    "padding": lambda x: functional.pad(x, (1, 2), value=7.0),
    "triangles": lambda x: (x.triu(1), x.tril(), x.clone().triu_(), x.clone().tril_(-1)),
    "masks": lambda x: (x.masked_fill(x > 0, -1.0), x.masked_fill(x > 0, x[0, 0]), x[x > 0], torch.nonzero(x > 0)),
    "bf16 and back": lambda x: x.to(torch.bfloat16).float(),
    "a copy between strides": lambda x: torch.zeros_like(x).t().copy_(x.t()).contiguous(),
}

#: With [2, 3] whole numbers from 0 to 5 in front.
INTEGERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one_hot": lambda n: functional.one_hot(n, 7),
    "arithmetic": lambda n: (n + 1, n - n, n * 3, n // 2, n % 4, -n, n.float() / 2),
    "bits": lambda n: (n & 1, n | 2, n ^ n.flip(0), ~n, n.bool() & (n > 1), n.bool() | (n > 4)),
    "logic": lambda n: [f(n, n.flip(1)) for f in (torch.logical_and, torch.logical_or, torch.logical_xor)],
    "not": lambda n: torch.logical_not(n),
    "indexing": lambda n: (n[n[0, :2] % 2], n[:, n[0] % 3], n[n % 2, n % 3], n.index_select(1, n[0] % 3)),
    "assignment": lambda n: _assigned(n),
    "gather": lambda n: n.gather(1, n % 3),
    "scatter": lambda n: (
        torch.zeros_like(n).scatter(1, n % 3, n),
        torch.zeros_like(n).scatter(1, n % 3, 9),
        torch.zeros_like(n).scatter_(0, n % 2, 9),
        torch.zeros_like(n).float().scatter_add(1, n % 3, n.float()),
    ),
    "embedding": lambda n: functional.embedding(n % 2, n.float()),
    "dtypes": lambda n: (n.int(), n.to(torch.int16), n.to(torch.int8), n.to(torch.uint8), n.bool(), n.half()),
    "sums": lambda n: (n.sum(), n.sum(1), (n > 2).sum(), n.cumsum(1)),
}


def _assigned(n: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second, third = n.clone(), n.clone(), n.clone()
    first[0, 1:] = 9
    second[n > 2] = 0
    third.index_put_((n[0] % 2, n[0] % 3), torch.ones_like(n[0]), accumulate=True)
    return first, second, third


def compare(function: Callable[[torch.Tensor], Any], given: torch.Tensor) -> None:
    got, want = function(given.npu()), function(given)
    both = zip(*([found] if isinstance(found, torch.Tensor) else found for found in (got, want)), strict=True)
    for ours, right in both:
        torch.testing.assert_close(ours.cpu(), right, equal_nan=True)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_floats(rng, name, dtype):
    given = torch.as_tensor(rng.standard_normal((3, 4))).to(dtype)
    if dtype == torch.float32:
        compare(FLOATS[name], given)
    else:  # sums on the host and on the device round differently; that the call is taken, in its shape
        for ours, right in zip(
            *(
                [found] if isinstance(found, torch.Tensor) else found
                for found in (FLOATS[name](given.npu()), FLOATS[name](given))
            ),
            strict=True,
        ):
            assert (ours.shape, ours.dtype) == (right.shape, right.dtype) and ours.cpu() is not None


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_of_integers(rng, name, dtype):
    if dtype == torch.int32 and name in ("one_hot", "gather", "scatter"):
        pytest.skip("torch takes int64 only")
    compare(INTEGERS[name], torch.as_tensor(rng.integers(0, 6, (2, 3))).to(dtype))


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.arange(5, device=device),
        lambda device: torch.arange(1, 9, 2, dtype=torch.int32, device=device),
        lambda device: torch.linspace(0, 1, 5, device=device),
        lambda device: torch.eye(3, 4, device=device),
        lambda device: torch.full((2, 3), 7.0, device=device),
        lambda device: torch.ones(3, dtype=torch.bool, device=device),
        lambda device: torch.zeros(3, dtype=torch.int8, device=device),
    ],
)
def test_made_on_the_device(make):
    torch.testing.assert_close(make("npu").cpu(), make("cpu"))


@pytest.mark.parametrize(
    ("fill", "lowest", "highest", "mean"),
    [
        (lambda: torch.rand(4096, device="npu"), 0, 1, 0.5),
        (lambda: torch.empty(4096, device="npu").uniform_(-3, 1), -3, 1, -1),
        (lambda: torch.randn(4096, device="npu") / 6 + 0.5, -1, 2, 0.5),
        (lambda: torch.empty(4096, device="npu").normal_(2, 0.1), 1, 3, 2),
        (lambda: torch.randint(3, 9, (4096,), device="npu"), 3, 8, 5.5),
        (lambda: torch.empty(4096, device="npu").random_(7), 0, 6, 3),
        (lambda: torch.bernoulli(torch.full((4096,), 0.25, device="npu")), 0, 1, 0.25),
        (lambda: torch.randperm(4096, device="npu"), 0, 4095, 2047.5),
    ],
)
def test_random_fills_follow_the_seed(fill, lowest, highest, mean):
    torch.manual_seed(3)
    first, other = fill().cpu(), fill().cpu()
    torch.manual_seed(3)
    assert torch.equal(fill().cpu(), first) and not torch.equal(first, other)
    spread = highest - lowest
    assert lowest <= first.min() <= lowest + spread / 2 < first.max() <= highest
    assert abs(first.double().mean() - mean) < spread / 20


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_the_wheel(rng, approximate):
    """`functional.gelu` on the device has one form only, whatever it is asked for."""
    x = torch.as_tensor(rng.standard_normal((3, 4))).float()
    got = torch.ops.npu.npu_gelu(x.npu(), approximate=approximate).cpu()
    torch.testing.assert_close(got, functional.gelu(x, approximate=approximate))


def test_assert_close_works_on_the_device():
    x = torch.arange(6.0).view(2, 3).npu()
    torch.testing.assert_close(x, x + 1e-7)
    with pytest.raises(AssertionError, match=r"Mismatched elements: 1 / 6[\s\S]*difference: 2.0 at index \(1, 2\)"):
        torch.testing.assert_close(x, torch.where(x == 5, x + 2, x))


def test_tensors_are_printed():
    assert str(torch.tensor([1.5, float("inf"), -2.0]).npu()) == "tensor([ 1.5000,     inf, -2.0000], device='npu:0')"
    assert str(torch.arange(3).npu()) == "tensor([0, 1, 2], device='npu:0')"
