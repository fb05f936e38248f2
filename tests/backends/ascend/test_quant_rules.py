"""8-bit rules on the emulator: against the reference, exact where only integers are added, for every dtype."""

import math

import pytest
import torch

from mla_fx.effects import ops
from tests.backends.ascend.conftest import close, on_device, random, refused
from tests.backends.ascend.test_expert_rules import issued
from tests.backends.ascend.test_rules import each_count, each_dtype, right, sixteen_bits, verify

pytestmark = pytest.mark.usefixtures("emulator")
GROUPS = {"some": ([2, 0, 3], 7), "all": ([1, 4], 5), "none": ([0, 0], 3), "one": ([2], 4), "no rows": ([0, 0], 0)}
each_group = pytest.mark.parametrize(("counts", "size"), GROUPS.values(), ids=GROUPS.keys())


def eight_bits(rng, *shape):
    return torch.as_tensor(rng.integers(-127, 128, shape)).to(torch.int8)


def scales(rng, *shape):
    return torch.as_tensor(rng.uniform(0.5, 2, shape)).float() / 127


@each_dtype
@each_count
@pytest.mark.parametrize("inner", [24, 1030], ids=["short", "two pieces"])
def test_quant_linear(rng, dtype, tokens, inner):
    x, weight, scale = random(rng, tokens, inner, dtype=dtype), eight_bits(rng, 5, inner), scales(rng, 5)
    (got,) = verify(ops.QuantLinear(), x, weight, scale / inner**0.5)
    assert got.dtype == dtype


@each_dtype
@pytest.mark.parametrize("grouped", [False, True])
def test_sums_are_of_integers_and_exact(rng, dtype, grouped):
    """20 000 products of about 9 000: what float32 adds up to here is off in most of 64 features.

    Steps are 1, since the largest number of the token is 127, and scales are powers of two, so that the one
    rounding is that of the sum.
    """
    x = torch.as_tensor(rng.integers(64, 128, (1, 20_000))).to(dtype)
    x[0, 7] = 127
    weight = torch.as_tensor(rng.integers(64, 128, (64, 20_000))).to(torch.int8)
    scale = torch.full((64,), 2.0**-13)  # which keeps it in the range of fp16
    want = (x.long() @ weight.long().t()).to(torch.float32) * scale
    if grouped:
        given = torch.stack((weight, weight)), torch.stack((scale, scale)), torch.tensor([0, 1])
        (got,) = on_device(ops.QuantGroupedLinear(), x, *given)
    else:
        (got,) = on_device(ops.QuantLinear(), x, weight, scale)
    assert torch.equal(got, want.to(dtype))


@each_dtype
def test_a_token_of_zeros_gives_zeros(rng, dtype):
    """Its step is 0; in which integers it comes then, nothing says."""
    x, weight, scale = random(rng, 3, 24, dtype=dtype), eight_bits(rng, 2, 5, 24), scales(rng, 2, 5)
    x[1] = 0
    (got,) = verify(ops.QuantLinear(), x, weight[0], scale[0])
    (grouped,) = on_device(ops.QuantGroupedLinear(), x, weight, scale, torch.tensor([2, 1]))
    assert not got[1].any() and not grouped[1].any() and got[0].any() and grouped[2].any()


@each_dtype
@each_count
def test_quant_linear_without_waiting(rng, emulator, dtype, tokens):
    """Two operators on the weight as it lies; in float32 the weight is widened."""
    given = random(rng, tokens, 24, dtype=dtype), eight_bits(rng, 5, 24), scales(rng, 5)
    names = issued(emulator, ops.QuantLinear(), *given)
    fused = ["aclnnDynamicQuantV2", "aclnnQuantMatmulV5"] if tokens else []
    assert names == fused if dtype != torch.float32 else "aclnnMatmul" in names or not tokens


def grouped_operands(rng, dtype, counts, size, inner=24):
    rows, weight = random(rng, size, inner, dtype=dtype), eight_bits(rng, len(counts), 5, inner)
    rows[sum(counts) :] = math.nan
    return rows, weight, scales(rng, len(counts), 5), torch.tensor(counts)


@each_dtype
@each_group
@pytest.mark.parametrize("inner", [24, 1030], ids=["short", "two pieces"])
def test_quant_grouped_linear(rng, dtype, counts, size, inner):
    """Beside bf16 the weight's scales are bf16: off by another 2^-8 at most, and by nothing else."""
    rows, weight, scale, numbers = grouped_operands(rng, dtype, counts, size, inner)
    (got,) = on_device(ops.QuantGroupedLinear(), rows, weight, scale, numbers)
    rounded = scale.bfloat16().float() if dtype == torch.bfloat16 else scale
    (want,) = right(ops.QuantGroupedLinear(), rows, weight, rounded, numbers)
    (unrounded,) = right(ops.QuantGroupedLinear(), rows, weight, scale, numbers)
    mine = slice(sum(counts))
    assert got.dtype == dtype and got.shape == want.shape
    close(got[mine], want[mine])
    torch.testing.assert_close(want[mine], unrounded[mine], rtol=2**-8, atol=0)
    assert dtype == torch.float32 or got[sum(counts) :].isnan().all()


@each_dtype
@each_group
def test_quant_grouped_linear_without_waiting(rng, emulator, dtype, counts, size):
    names = issued(emulator, ops.QuantGroupedLinear(), *grouped_operands(rng, dtype, counts, size))
    assert names.count("aclnnGroupedMatmulV5") == bool(size)
    assert names.count("aclnnDynamicQuantV2") == (bool(size) and dtype != torch.float32)


# --- refusals -------------------------------------------------------------------------


@sixteen_bits
@pytest.mark.parametrize(("name", "shape"), [("D", (1, 65536)), ("F", (65536, 1))])
def test_sizes_that_the_operator_does_not_take(dtype, name, shape):
    weight = torch.ones(shape, dtype=torch.int8)
    x, scale = torch.ones(1, shape[1], dtype=dtype), torch.ones(shape[0])
    why = refused(ops.QuantLinear(), x, weight, scale)
    assert f"{name}: an 8-bit projection on ascend needs 1 to 65535 features: got 65536" in why
    stacked = torch.stack((weight, weight)), torch.stack((scale, scale)), torch.tensor([1, 0])
    why = refused(ops.QuantGroupedLinear(), x, *stacked)
    assert f"{name}: a grouped projection on ascend needs 1 to 65535 features: got 65536" in why


def test_a_dtype_that_nothing_takes():
    x, weight = torch.ones(1, 4).double(), torch.ones(1, 3, 4, dtype=torch.int8)
    scale = torch.ones(1, 3).double()
    why = "on ascend must be bf16, fp16 or fp32: got fp64"
    assert refused(ops.QuantLinear(), x, weight[0], scale[0]) == f"quant_linear: x: {why}"
    grouped = refused(ops.QuantGroupedLinear(), x, weight, scale, torch.tensor([1]))
    assert grouped == f"quant_grouped_linear: rows: {why}"
