"""`ops.QuantLinear`: project features with an 8-bit weight, tokens quantised as they come."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, on_cpu, strided

KINDS = {torch.float32: np.float32, torch.float64: np.float64}


def quantised(row, wide):
    """A token's step and integers; division as IEEE has it in the wide dtype, `round` is to even."""
    row = row.astype(KINDS[wide])
    step = max(abs(row), default=KINDS[wide](0)) / KINDS[wide](127)
    return float(step), [round(float(a / step)) if step else 0 for a in row]


def oracle(x, weight, scale, wide):
    out = np.zeros((len(x), len(weight)))
    for t, row in enumerate(x):
        step, q = quantised(row, wide)
        for f, column in enumerate(weight.tolist()):
            out[t, f] = step * scale[f] * sum(a * b for a, b in zip(q, column, strict=True))
    return out


def draw(rules, rng, *shape):
    """A weight with all of int8 and a scale for each of its output features."""
    weight = rules.tensor(rng.integers(-128, 128, shape), torch.int8)
    return weight, rules.tensor(0.02 * rng.random(shape[:-1]) + 0.001, rules.wide)


@each("shape", [(3, 5, 4), (1, 64, 9), (0, 5, 4), (2, 1, 1), (3, 0, 2), (40, 33, 17)])
@each("layout", [torch.clone, strided])
def test_quant_linear(rules, rng, shape, layout):
    tokens, features, out = shape
    x, (weight, scale) = rules.random(rng, tokens, features), draw(rules, rng, out, features)
    (got,) = rules(ops.QuantLinear(), layout(x), layout(weight), layout(scale))
    rules.close(got, oracle(exact(x), weight, exact(scale), rules.wide))


def test_every_token_has_a_step_of_its_own(rules, rng):
    """A token a thousand times as big loses nothing of the others, wherever its biggest feature is, and of any sign."""
    x, (weight, scale) = rules.random(rng, 4, 16), draw(rules, rng, 5, 16)
    x[1] *= 1024
    x[0, 15], x[2, 0] = -9, 9
    (got,) = rules(ops.QuantLinear(), x, weight, scale)
    rules.close(got, oracle(exact(x), weight, exact(scale), rules.wide))


def identity(rules, features):
    """Results are the integers, times the step."""
    return torch.eye(features, dtype=torch.int8), rules.tensor(np.ones(features), rules.wide)


def test_rounding_to_even(rules):
    """The step is 1, and then 1/2: halves go to the even neighbour."""
    x = [127, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 125.5, 126.5, -126.5, 2.25]
    want = [127, 0, 2, 2, 4, 0, -2, -2, 126, 126, -126, 2]
    (got,) = rules(ops.QuantLinear(), rules.tensor([x, np.array(x) / 2]), *identity(rules, 12))
    np.testing.assert_array_equal(exact(got), [want, np.array(want) / 2])


def test_a_token_of_zeros_gives_zero(rules, rng):
    x, (weight, scale) = rules.random(rng, 4, 6), draw(rules, rng, 3, 6)
    want = rules(ops.QuantLinear(), x, weight, scale)[0].clone()
    x[0], x[2], want[[0, 2]] = 0.0, -0.0, 0
    (got,) = rules(ops.QuantLinear(), x, weight, scale)
    assert torch.equal(got, want)


def test_a_step_that_vanishes_gives_zero(rules):
    """The smallest number of the wide dtype, over 127, is 0; in 16 bits there is none as small."""
    smallest = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}[rules.wide]
    (got,) = rules(ops.QuantLinear(), rules.tensor([[smallest, 0.0, -smallest], [127, 1, -127]]), *identity(rules, 3))
    assert got.tolist() == [[0, 0, 0], [127, 1, -127]]


@each("poison", [math.nan, math.inf, -math.inf])
def test_poison_stays_in_its_token(rules, rng, poison):
    """Of an infinite step the integers are not numbers, either."""
    x, (weight, scale) = rules.random(rng, 4, 6), draw(rules, rng, 3, 6)
    want = rules(ops.QuantLinear(), x, weight, scale)[0].clone()
    x[1, 4], want[1] = poison, math.nan
    (got,) = rules(ops.QuantLinear(), x, weight, scale)
    np.testing.assert_array_equal(exact(got), exact(want))


def extremes(rng, tokens, features, out):
    """Integers of tokens with step 1 and weights that agree in sign: sums that float32 cannot count up to."""
    sign = rng.choice([-1, 1], features)
    x = rng.integers(120, 128, (tokens, features)) * sign * rng.choice([-1, 1], (tokens, 1))
    x[:, 0] = 127
    weight = rng.integers(115, 128, (out, features)) * sign
    weight[0] = np.where(sign > 0, 127, -128)
    weight[1] = np.where(sign > 0, -128, 127)
    return x, weight


def rounded(rules, total):
    """Exact integers times 2^-10, with one rounding to float32 and one to the dtype."""
    return torch.as_tensor(total).to(rules.wide).mul(2.0**-10).to(rules.dtype)


@each("tokens", [1, 3, 40])
def test_sums_are_of_integers(rules, rng, tokens):
    x, weight = extremes(rng, tokens, 2048, 64)
    total = x.astype(np.int64) @ weight.T
    assert abs(total).min() > 2**24 and (total % 2 == 1).any()
    scale = rules.tensor(np.full(64, 2.0**-10), rules.wide)
    (got,) = rules(ops.QuantLinear(), rules.tensor(x), rules.tensor(weight, torch.int8), scale)
    assert torch.equal(got, rounded(rules, total))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(rng, dtype):
    """Correctly rounded, but for the rare element where float32 falls on the other side of a tie."""
    x = torch.as_tensor(rng.standard_normal((12, 64))).to(dtype)
    weight = torch.as_tensor(rng.integers(-128, 128, (96, 64))).to(torch.int8)
    scale = torch.as_tensor(0.01 * rng.random(96)).to(torch.float32)
    want = torch.as_tensor(oracle(exact(x), weight, exact(scale), torch.float32)).to(dtype)
    (got,) = on_cpu(dtype)(ops.QuantLinear(), x, weight, scale)
    assert (got != want).sum() <= 8


def test_operands_stay_as_they_were(rules, rng):
    operands = (rules.random(rng, 3, 8), *draw(rules, rng, 4, 8))
    before = [t.clone() for t in operands]
    rules(ops.QuantLinear(), *operands)
    assert all(map(torch.equal, operands, before))


AVALS = {"x": Aval((3, 8), "bf16"), "weight": Aval((5, 8), "int8"), "scale": Aval((5,), "fp32")}


def test_shapes():
    op = ops.QuantLinear()
    for dtype, wide in (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")):
        given = Aval((3, 8), dtype), AVALS["weight"], Aval((5,), wide)
        assert op.infer(*given) == (Aval((3, 5), dtype),)


@pytest.mark.parametrize(
    ("operand", "aval", "message"),
    [
        ("x", Aval((3, 8), "int8"), r"x must be floating \(bf16, fp16, fp32, fp64\): got int8"),
        ("x", Aval((3, 8), "fp64"), r"scale must be fp64, to go with x, fp64: got fp32"),
        ("x", Aval((8,), "bf16"), r"x must be \[T, D\], 2 axes: got bf16\[8\], 1 axes"),
        ("weight", Aval((5, 7), "int8"), r"axis D .* 8 in x, 7 in weight"),
        ("weight", Aval((5, 8), "bf16"), r"weight must be int8: got bf16"),
        ("scale", Aval((4,), "fp32"), r"axis F .* 5 in weight, 4 in scale"),
        ("scale", Aval((5,), "bf16"), r"scale must be fp32, to go with x, bf16: got bf16"),
    ],
)
def test_shapes_that_are_refused(operand, aval, message):
    with pytest.raises(ShapeError, match="^quant_linear: " + message):
        ops.QuantLinear().infer(*(AVALS | {operand: aval}).values())
