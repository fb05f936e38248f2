"""`ops.TakeRows`: the rows that are asked for."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, InputError, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided

CASES = [(3, [2]), (5, [4, 0, 2]), (3, [1, 1, 1, 1]), (4, [0, 1, 2, 3]), (1, [0]), (3, []), (0, [])]


@each(("tokens", "rows"), CASES)
@each("layout", [torch.clone, strided])
def test_rows_that_are_asked_for(rules, rng, tokens, rows, layout):
    x = rules.random(rng, tokens, 5)
    (got,) = rules(ops.TakeRows(), layout(x), layout(torch.tensor(rows, dtype=torch.int64)))
    np.testing.assert_array_equal(exact(got), np.array([exact(x)[row] for row in rows]).reshape(len(rows), 5))


def test_nobody_reads_the_others(rules):
    x = rules.tensor([[math.nan] * 2, [1.0, -0.0], [math.inf] * 2])
    (got,) = rules(ops.TakeRows(), x, torch.tensor([1, 1]))
    np.testing.assert_array_equal(exact(got), [[1, 0], [1, 0]])
    assert got.signbit().tolist() == [[False, True]] * 2


def test_a_result_is_a_copy(rules, rng):
    """All rows in their order are no excuse to hand out the operand."""
    x = rules.random(rng, 3, 4)
    before = x.clone()
    (got,) = rules(ops.TakeRows(), x, torch.arange(3))
    got.zero_()
    assert torch.equal(x, before)


AVALS = {"x": Aval((5, 8), "bf16"), "rows": Aval((2,), "int64")}


def test_shapes():
    op = ops.TakeRows()
    assert op.infer(*AVALS.values()) == (Aval((2, 8), "bf16"),)
    assert op.infer(Aval((5, 8), "fp32"), Aval((9,), "int64")) == (Aval((9, 8), "fp32"),)


@pytest.mark.parametrize(
    ("operand", "aval", "message"),
    [
        ("x", Aval((5, 8), "int64"), r"x must be floating \(bf16, fp16, fp32, fp64\): got int64"),
        ("x", Aval((5, 8, 1), "bf16"), r"x must be \[T, D\], 2 axes: got bf16\[5, 8, 1\], 3 axes"),
        ("rows", Aval((2,), "int32"), r"rows must be int64: got int32"),
        ("rows", Aval((2, 1), "int64"), r"rows must be \[O\], 1 axes: got int64\[2, 1\], 2 axes"),
    ],
)
def test_shapes_that_are_refused(operand, aval, message):
    with pytest.raises(ShapeError, match="take_rows: " + message):
        ops.TakeRows().infer(*(AVALS | {operand: aval}).values())


@pytest.mark.parametrize("rows", [[0, 4], [3, 3], []])
def test_values_that_are_accepted(rows):
    ops.TakeRows().value_rule(AVALS, {"rows": np.array(rows, dtype=np.int64)})


@pytest.mark.parametrize(("rows", "wrong"), [([0, 5, 6], 5), ([5], 5), ([-1, 2], -1), ([4, -3], -3)])
def test_values_that_are_refused(rows, wrong):
    """Rows are counted from 0: no row from the end."""
    with pytest.raises(InputError, match=rf"^rows: each must be in 0\.\.4: got {wrong}$"):
        ops.TakeRows().value_rule(AVALS, {"rows": np.array(rows)})
