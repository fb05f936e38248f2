"""`ops.RmsNorm`: normalise the first features of a row."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, on_cpu, strided

SENSE = {"epsilon": 1e-6}
NONSENSE = {"epsilon": (-1e-6, math.nan, math.inf, "x", None, True)}


def oracle(x, weight, epsilon):
    features = len(weight)
    out = np.zeros((len(x), features))
    for t, row in enumerate(x):
        mean = sum(v * v for v in row[:features]) / features
        out[t] = [v / math.sqrt(mean + epsilon) * w for v, w in zip(row, weight, strict=False)]
    return out


@each(("tokens", "width", "features"), [(3, 9, 9), (2, 9, 6), (0, 9, 6), (1, 576, 512)])
def test_rms_norm(rules, rng, tokens, width, features):
    x, weight = rules.random(rng, tokens, width), rules.random(rng, features)
    x[:, features:] = math.nan  # not read
    (got,) = rules(ops.RmsNorm(1e-6), x, weight)
    rules.close(got, oracle(exact(x), exact(weight), 1e-6))


@each("epsilon", [1e-6, 1e-2])
def test_epsilon_counts_in_small_rows(rules, rng, epsilon):
    x, weight = rules.random(rng, 2, 8) * 0.01, rules.random(rng, 8)
    (got,) = rules(ops.RmsNorm(epsilon), x, weight)
    rules.close(got, oracle(exact(x), exact(weight), epsilon))


def test_strided_operands(rules, rng):
    x, weight = rules.random(rng, 3, 9), rules.random(rng, 6)
    (got,) = rules(ops.RmsNorm(1e-6), strided(x), strided(weight))
    rules.close(got, oracle(exact(x), exact(weight), 1e-6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(rng, dtype):
    """Correctly rounded, but for the rare element where float32 falls on the other side of a tie."""
    x = torch.as_tensor(rng.standard_normal((16, 512))).to(dtype)
    weight = torch.as_tensor(1 + 0.3 * rng.standard_normal(512)).to(dtype)
    wide = x.double()
    want = (wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()).to(dtype)
    (got,) = on_cpu(dtype)(ops.RmsNorm(1e-6), x, weight)
    assert (got != want).sum() <= 8


def test_shapes():
    op = ops.RmsNorm(1e-6)
    assert op.infer(Aval((3, 576), "bf16"), Aval((512,), "bf16")) == (Aval((3, 512), "bf16"),)
    assert op.infer(Aval((3, 8), "fp32"), Aval((8,), "fp32")) == (Aval((3, 8), "fp32"),)
    with pytest.raises(ShapeError, match=r"rms_norm: axis F of weight must be at most .* 9 in weight, 8 in x"):
        op.infer(Aval((3, 8), "bf16"), Aval((9,), "bf16"))
    with pytest.raises(ShapeError, match=r"rms_norm: weight must have the dtype of x, bf16: got fp32"):
        op.infer(Aval((3, 8), "bf16"), Aval((8,), "fp32"))
