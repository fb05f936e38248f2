"""`ops.Swiglu`: the gated activation of a feed-forward network."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, on_cpu, strided


def silu(a):
    """a / (1 + exp(-a)), without an exponential that overflows."""
    return a / (1 + math.exp(-a)) if a > 0 else a * math.exp(a) / (1 + math.exp(a))


def oracle(x):
    half = x.shape[1] // 2
    out = np.zeros((len(x), half))
    for t, row in enumerate(x):
        for f in range(half):
            out[t, f] = silu(row[f]) * row[half + f]
    return out


@each(("tokens", "features"), [(3, 5), (1, 64), (2, 1), (0, 5), (3, 0), (17, 33)])
@each("layout", [torch.clone, strided])
def test_swiglu(rules, rng, tokens, features, layout):
    x = rules.random(rng, tokens, 2 * features) * 3
    (got,) = rules(ops.Swiglu(), layout(x))
    rules.close(got, oracle(exact(x)))


def test_gate_comes_first(rules):
    """A gate far below 0 closes, one far above lets the other half through; neither makes a NaN."""
    gate, up = [0.0, -1000.0, 1000.0, -1000.0, 30.0], [5.0, 2.0, 0.5, 1000.0, -3.0]
    (got,) = rules(ops.Swiglu(), rules.tensor([gate + up]))
    rules.close(got, [[0, 0, 500, 0, -90]])


def test_nan_stays_in_its_feature(rules):
    """Whether in the gate or in what it lets through."""
    x = rules.tensor([[math.nan, 1.0, 1.0, 2.0, 2.0, math.nan], [1.0] * 6])
    (got,) = rules(ops.Swiglu(), x)
    assert got.isnan().tolist() == [[True, False, True], [False] * 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(rng, dtype):
    """Correctly rounded, but for the rare element where float32 falls on the other side of a tie."""
    x = torch.as_tensor(rng.standard_normal((16, 1024))).to(dtype)
    want = torch.as_tensor(oracle(exact(x))).to(dtype)
    (got,) = on_cpu(dtype)(ops.Swiglu(), x)
    assert (got != want).sum() <= 8


def test_shapes():
    op = ops.Swiglu()
    assert op.infer(Aval((3, 10), "bf16")) == (Aval((3, 5), "bf16"),)
    with pytest.raises(ShapeError, match=r"swiglu: axis D of x must be even, gate and up: got 9"):
        op.infer(Aval((3, 9), "bf16"))
    with pytest.raises(ShapeError, match=r"swiglu: x must be floating \(bf16, fp16, fp32, fp64\): got int8"):
        op.infer(Aval((3, 10), "int8"))
    with pytest.raises(ShapeError, match=r"swiglu: x must be \[T, D\], 2 axes: got bf16\[10\], 1 axes"):
        op.infer(Aval((10,), "bf16"))
