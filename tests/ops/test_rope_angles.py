"""`ops.RopeAngles`: cosine and sine of the rotary angles."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, InputError, ShapeError, ops
from tests.cases import each

SENSE = {"frequencies": (1.0, 0.5), "magnitude": 1.25, "rounded": True}
NONSENSE = {
    "frequencies": ([1.0], 1.0, None, (1.0, -0.5), (math.nan,), (math.inf,), ("1",)),
    "magnitude": (0, -1.0, math.nan, math.inf, "1", None, True),
    "rounded": (1, None, "bf16"),
}


@each("magnitude", [1.0, 1.25])
@each("positions", [[0, 1, 3, 4095], [163839, 2**22 - 1], []])
def test_angles(rules, positions, magnitude):
    frequencies = (1.0, 0.0390069, 3.3338e-6)
    like = rules.tensor(np.zeros((len(positions), 5)))
    op = ops.RopeAngles(frequencies, magnitude)
    cos, sin = rules(op, torch.tensor(positions, dtype=torch.int64), like)
    assert cos.dtype == sin.dtype == rules.wide
    want = np.array([[p * f for f in 2 * frequencies] for p in positions]).reshape(-1, 6)
    # One rounding of the result, wherever the position is: an angle rounded to float32 would be off by more.
    tolerance = 1e-12 if rules.wide == torch.float64 else 1e-7
    for got, function in ((cos, math.cos), (sin, math.sin)):
        exactly = magnitude * np.vectorize(function, otypes=[float])(want)
        np.testing.assert_allclose(got.numpy(), exactly, rtol=0, atol=tolerance)


def test_rounded(rules):
    """The wide ones, rounded once to the dtype of the activations."""
    positions, like = torch.tensor([0, 7, 4095]), rules.tensor(np.zeros((3, 5)))
    found = rules(ops.RopeAngles((1.0, 0.3), 1.25, rounded=True), positions, like)
    for got, wide in zip(found, rules(ops.RopeAngles((1.0, 0.3), 1.25), positions, like), strict=True):
        assert got.dtype == rules.dtype and torch.equal(got, wide.to(rules.dtype))


def test_only_the_dtype_of_like_is_looked_at(rules):
    like = rules.tensor(np.full((2, 3), np.nan))
    cos, _ = rules(ops.RopeAngles((1.0,), 1.0), torch.tensor([0, 0]), like)
    assert cos.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_strided_positions(rules):
    positions = torch.tensor([[5, 9], [6, 9], [7, 9]])[:, 0]
    cos, _ = rules(ops.RopeAngles((0.5,), 1.0), positions, rules.tensor(np.zeros((3, 1))))
    np.testing.assert_allclose(cos[:, 0].numpy(), [math.cos(p / 2) for p in (5, 6, 7)], atol=1e-7)


@pytest.mark.parametrize("positions", [[], [0, 2**22 - 1], [7, 7]])
def test_positions_that_there_are(positions):
    ops.RopeAngles((1.0,), 1.0).value_rule({}, {"positions": np.array(positions, dtype=np.int64)})


@pytest.mark.parametrize(("positions", "wrong"), [([3, -1], -1), ([2**22], 2**22), ([0, 2**40, -5], 2**40)])
def test_positions_that_there_are_not(positions, wrong):
    with pytest.raises(InputError, match=rf"positions: each must be in 0\.\.4194303: got {wrong}$"):
        ops.RopeAngles((1.0,), 1.0).value_rule({}, {"positions": np.array(positions)})


@pytest.mark.parametrize(("dtype", "angles"), [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")])
def test_shapes(dtype, angles):
    op = ops.RopeAngles((1.0, 0.1), 1.0)
    for like in (Aval((4, 8), dtype), Aval((3, 8), dtype)):
        given = (Aval((4,), "int64"), like)
        assert op.infer(*given) == (Aval((4, 4), angles),) * 2
        assert ops.RopeAngles((1.0, 0.1), 1.0, rounded=True).infer(*given) == (Aval((4, 4), dtype),) * 2
    with pytest.raises(ShapeError, match=r"rope_angles: positions must be int64: got int32"):
        op.infer(Aval((4,), "int32"), Aval((4, 8), dtype))
