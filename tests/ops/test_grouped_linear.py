"""`ops.GroupedLinear`: project the rows of every expert with that expert's weight."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, on_cpu, strided

#: Counts of the experts, and rows behind them.
CASES = [([2, 3], 0), ([1], 0), ([0, 4, 0, 0, 2, 0], 3), ([0, 0], 5), ([0, 0], 0), ([], 2), ([40, 1], 7)]


def oracle(rows, weight, counts):
    expert = [y for y, count in enumerate(counts) for _ in range(count)]
    out = np.zeros((len(expert), weight.shape[1]))
    for g, y in enumerate(expert):
        for f in range(weight.shape[1]):
            out[g, f] = sum(a * b for a, b in zip(rows[g], weight[y, f], strict=True))
    return out


def verify(rules, rows, weight, counts, layout=torch.clone):
    """Rows behind the last count are poison, and their results hold anything."""
    rows[sum(counts) :] = math.nan
    of_experts = torch.tensor(counts, dtype=torch.int64)
    (got,) = rules(ops.GroupedLinear(), layout(rows), layout(weight), layout(of_experts))
    rules.close(got[: sum(counts)], oracle(exact(rows), exact(weight), counts))


@each(("counts", "behind"), CASES)
@each(("features", "out"), [(5, 4), (64, 9), (1, 1)])
@each("layout", [torch.clone, strided])
def test_grouped_linear(rules, rng, counts, behind, features, out, layout):
    rows, weight = rules.random(rng, sum(counts) + behind, features), rules.random(rng, len(counts), out, features)
    verify(rules, rows, weight, counts, layout)


def test_experts_without_rows_are_not_read(rules, rng):
    rows, weight = rules.random(rng, 4, 3), rules.random(rng, 4, 2, 3)
    weight[0], weight[2] = math.nan, math.inf
    verify(rules, rows, weight, [0, 2, 0, 1])


def test_poison_stays_in_its_expert(rules, rng):
    rows, weight = rules.random(rng, 5, 3), rules.random(rng, 3, 2, 3)
    weight[1, 0, 2] = rows[4, 1] = math.nan
    (got,) = rules(ops.GroupedLinear(), rows, weight, torch.tensor([2, 1, 2]))
    assert got.isnan().tolist() == [[False, False], [False, False], [True, False], [False, False], [True, True]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(rng, dtype):
    """A big product hides each small one in 16 bits, not their sum; one row an expert, and several."""
    small = torch.finfo(dtype).eps / 4
    rows = torch.ones(6, 9, dtype=dtype)
    weight = torch.tensor([[[1.0, *[small] * 8]], [[2.0, *[2 * small] * 8]]]).to(dtype)
    (got,) = on_cpu(dtype)(ops.GroupedLinear(), rows, weight, torch.tensor([1, 5]))
    step = 2 * torch.finfo(dtype).eps
    assert got.flatten().tolist() == [1 + step, *[2 + 2 * step] * 5]


AVALS = {"rows": Aval((12, 8), "bf16"), "weight": Aval((3, 5, 8), "bf16"), "counts": Aval((3,), "int64")}


def test_shapes():
    assert ops.GroupedLinear().infer(*AVALS.values()) == (Aval((12, 5), "bf16"),)


@pytest.mark.parametrize(
    ("operand", "aval", "message"),
    [
        ("weight", Aval((3, 5, 7), "bf16"), r"axis D .* 8 in rows, 7 in weight"),
        ("weight", Aval((3, 5, 8), "fp32"), r"weight must have the dtype of rows, bf16: got fp32"),
        ("weight", Aval((5, 8), "bf16"), r"weight must be \[Y, F, D\], 3 axes: got bf16\[5, 8\], 2 axes"),
        ("rows", Aval((12, 8), "int8"), r"rows must be floating \(bf16, .*\): got int8"),
        ("counts", Aval((4,), "int64"), r"axis Y .* 3 in weight, 4 in counts"),
        ("counts", Aval((3,), "int32"), r"counts must be int64: got int32"),
    ],
)
def test_shapes_that_are_refused(operand, aval, message):
    with pytest.raises(ShapeError, match="grouped_linear: " + message):
        ops.GroupedLinear().infer(*(AVALS | {operand: aval}).values())
