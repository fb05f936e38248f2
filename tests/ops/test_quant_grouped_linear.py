"""`ops.QuantGroupedLinear`: project the rows of every expert with that expert's 8-bit weight."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, on_cpu, strided
from tests.ops.test_quant_linear import draw, extremes, quantised, rounded

#: Counts of the experts, and rows behind them.
CASES = [([2, 3], 0), ([1], 0), ([0, 4, 0, 0, 2, 0], 3), ([0, 0], 5), ([0, 0], 0), ([], 2), ([40, 1], 7)]


def oracle(rows, weight, scale, counts, wide):
    expert = [y for y, count in enumerate(counts) for _ in range(count)]
    out = np.zeros((len(expert), weight.shape[1]))
    for g, y in enumerate(expert):
        step, q = quantised(rows[g], wide)
        for f, column in enumerate(weight[y].tolist()):
            out[g, f] = step * scale[y, f] * sum(a * b for a, b in zip(q, column, strict=True))
    return out


def run(rules, rows, weight, scale, counts, layout=torch.clone):
    """The rows of experts; those behind the last count hold anything."""
    of_experts = torch.tensor(counts, dtype=torch.int64)
    (got,) = rules(ops.QuantGroupedLinear(), layout(rows), layout(weight), layout(scale), layout(of_experts))
    return got[: sum(counts)]


@each(("counts", "behind"), CASES)
@each(("features", "out"), [(5, 4), (64, 9), (1, 1)])
@each("layout", [torch.clone, strided])
def test_quant_grouped_linear(rules, rng, counts, behind, features, out, layout):
    """Rows behind the last count are poison."""
    rows, (weight, scale) = (
        rules.random(rng, sum(counts) + behind, features),
        draw(rules, rng, len(counts), out, features),
    )
    rows[sum(counts) :] = math.nan
    got = run(rules, rows, weight, scale, counts, layout)
    rules.close(got, oracle(exact(rows), weight, exact(scale), counts, rules.wide))


def test_every_row_has_a_step_of_its_own(rules, rng):
    """Rows of one expert of very different size; a big row behind the last count counts for none."""
    rows, (weight, scale) = rules.random(rng, 5, 16), draw(rules, rng, 2, 3, 16)
    rows[1], rows[4] = rows[1] * 512, rows[4] * 4096
    got = run(rules, rows, weight, scale, [3, 1])
    rules.close(got, oracle(exact(rows), weight, exact(scale), [3, 1], rules.wide))


def test_rounding_to_even(rules):
    x = [127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]
    want = np.array([127, 0, 2, 2, 0, -2, 126])
    eye = torch.eye(7, dtype=torch.int8).repeat(2, 1, 1) * torch.tensor([1, -1], dtype=torch.int8).view(2, 1, 1)
    got = run(rules, rules.tensor([x, x, x]), eye, rules.tensor(np.ones((2, 7)), rules.wide), [1, 2])
    np.testing.assert_array_equal(exact(got), [want, -want, -want])


def test_a_row_of_zeros_gives_zero(rules, rng):
    rows, (weight, scale) = rules.random(rng, 4, 6), draw(rules, rng, 2, 3, 6)
    want = run(rules, rows, weight, scale, [2, 2]).clone()
    rows[0], rows[3], want[[0, 3]] = 0.0, -0.0, 0
    assert torch.equal(run(rules, rows, weight, scale, [2, 2]), want)


@each("poison", [math.nan, math.inf])
def test_poison_stays_in_its_row(rules, rng, poison):
    rows, (weight, scale) = rules.random(rng, 4, 6), draw(rules, rng, 2, 3, 6)
    want = run(rules, rows, weight, scale, [3, 1]).clone()
    rows[1, 4], want[1] = poison, math.nan
    np.testing.assert_array_equal(exact(run(rules, rows, weight, scale, [3, 1])), exact(want))


def test_poison_in_a_scale_stays_in_its_expert_and_feature(rules, rng):
    """That of an expert without rows is not read."""
    rows, (weight, scale) = rules.random(rng, 4, 6), draw(rules, rng, 3, 2, 6)
    scale[0], scale[1, 0] = math.nan, math.nan
    got = run(rules, rows, weight, scale, [0, 3, 1])
    assert got.isnan().tolist() == [*[[True, False]] * 3, [False, False]]


@each("counts", [[1, 40, 0], [0, 2, 3]])
def test_sums_are_of_integers(rules, rng, counts):
    x, weight = extremes(rng, sum(counts), 2048, 64)
    of_experts = np.stack([weight, np.minimum(-weight, 127), weight[::-1]])
    expert = np.repeat(np.arange(3), counts)
    total = np.stack([of_experts[y].astype(np.int64) @ row for y, row in zip(expert, x, strict=True)])
    assert abs(total).min() > 2**24 and (total % 2 == 1).any()
    scale = rules.tensor(np.full((3, 64), 2.0**-10), rules.wide)
    got = run(rules, rules.tensor(x), rules.tensor(of_experts, torch.int8), scale, counts)
    assert torch.equal(got, rounded(rules, total))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(rng, dtype):
    """Correctly rounded, but for the rare element where float32 falls on the other side of a tie."""
    counts = [1, 0, 7, 4]
    rows = torch.as_tensor(rng.standard_normal((12, 64))).to(dtype)
    weight = torch.as_tensor(rng.integers(-128, 128, (4, 96, 64))).to(torch.int8)
    scale = torch.as_tensor(0.01 * rng.random((4, 96))).to(torch.float32)
    want = torch.as_tensor(oracle(exact(rows), weight, exact(scale), counts, torch.float32)).to(dtype)
    (got,) = on_cpu(dtype)(ops.QuantGroupedLinear(), rows, weight, scale, torch.tensor(counts))
    assert (got != want).sum() <= 8


def test_operands_stay_as_they_were(rules, rng):
    operands = (rules.random(rng, 5, 8), *draw(rules, rng, 2, 4, 8), torch.tensor([3, 1]))
    before = [t.clone() for t in operands]
    rules(ops.QuantGroupedLinear(), *operands)
    assert all(map(torch.equal, operands, before))


AVALS = {
    "rows": Aval((12, 8), "bf16"),
    "weight": Aval((3, 5, 8), "int8"),
    "scale": Aval((3, 5), "fp32"),
    "counts": Aval((3,), "int64"),
}


def test_shapes():
    op = ops.QuantGroupedLinear()
    for dtype, wide in (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")):
        given = AVALS | {"rows": Aval((12, 8), dtype), "scale": Aval((3, 5), wide)}
        assert op.infer(*given.values()) == (Aval((12, 5), dtype),)


@pytest.mark.parametrize(
    ("operand", "aval", "message"),
    [
        ("rows", Aval((12, 8), "int8"), r"rows must be floating \(bf16, fp16, fp32, fp64\): got int8"),
        ("rows", Aval((12, 8), "fp64"), r"scale must be fp64, to go with rows, fp64: got fp32"),
        ("rows", Aval((8,), "bf16"), r"rows must be \[Z, D\], 2 axes: got bf16\[8\], 1 axes"),
        ("weight", Aval((3, 5, 7), "int8"), r"axis D .* 8 in rows, 7 in weight"),
        ("weight", Aval((3, 5, 8), "bf16"), r"weight must be int8: got bf16"),
        ("scale", Aval((3, 4), "fp32"), r"axis F .* 5 in weight, 4 in scale"),
        ("scale", Aval((2, 5), "fp32"), r"axis Y .* 3 in weight, 2 in scale"),
        ("scale", Aval((3, 5), "fp16"), r"scale must be fp32, to go with rows, bf16: got fp16"),
        ("counts", Aval((4,), "int64"), r"axis Y .* 3 in weight, 4 in counts"),
        ("counts", Aval((3,), "int32"), r"counts must be int64: got int32"),
    ],
)
def test_shapes_that_are_refused(operand, aval, message):
    with pytest.raises(ShapeError, match="^quant_grouped_linear: " + message):
        ops.QuantGroupedLinear().infer(*(AVALS | {operand: aval}).values())
