"""`ops.AllGather`: the ranks' features side by side."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, Group, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided

SENSE = {"features": 3}
NONSENSE = {"features": (-1, 3.0, "3", None, True)}
#: Features and ranks; of (5, 4) and (2, 3) the last rank has padding only.
CASES = [(4, 1), (6, 2), (7, 2), (8, 3), (5, 4), (2, 3), (13, 5)]


@each(("features", "ranks"), CASES)
@each("tokens", [0, 1, 3])
@each("layout", [torch.clone, strided])
def test_features_side_by_side(rules, rng, features, ranks, tokens, layout):
    own = math.ceil(features / ranks)
    given = [rules.random(rng, tokens, own) for _ in range(ranks)]
    want = np.zeros((tokens, features))
    for rank, x in enumerate(given):
        for f in range(own):
            if rank * own + f < features:
                want[:, rank * own + f] = exact(x)[:, f]
            else:
                x[:, f] = math.nan  # padding
    before = [x.clone() for x in given]
    for (got,) in rules.group(ops.AllGather(features, Group("tp", ranks)), [(layout(x),) for x in given]):
        np.testing.assert_array_equal(exact(got), want)
    assert all(torch.equal(x.nan_to_num(9), y.nan_to_num(9)) for x, y in zip(given, before, strict=True))


def test_one_rank_gets_a_copy(rules, rng):
    x = rules.random(rng, 2, 3)
    before = x.clone()
    rules.group(ops.AllGather(3, Group("tp", 1)), [(x,)])[0][0].zero_()
    assert torch.equal(x, before)


def test_nan_of_one_rank_stays_in_its_features(rules):
    x, poisoned = rules.tensor([[1.0, 2.0], [3.0, 4.0]]), rules.tensor([[5.0, math.nan], [7.0, 8.0]])
    for (got,) in rules.group(ops.AllGather(4, Group("tp", 2)), [(poisoned,), (x,)]):
        rules.close(got, [[5, math.nan, 1, 2], [7, 8, 3, 4]])


@pytest.mark.parametrize(("features", "ranks"), [(3, 1), (6, 2), (5, 2), (9, 3), (7, 3)])
def test_shapes(features, ranks):
    assert ops.AllGather(features, Group("tp", ranks)).infer(Aval((4, 3), "fp16")) == (Aval((4, features), "fp16"),)


@pytest.mark.parametrize(
    ("aval", "message"),
    [
        (Aval((4, 2), "bf16"), r"axis F of x must be 3, 5 features over tp\[2\]: got 2"),
        (Aval((4, 5), "bf16"), r"axis F of x must be 3, 5 features over tp\[2\]: got 5"),
        (Aval((4, 3), "int8"), r"x must be floating \(bf16, fp16, fp32, fp64\): got int8"),
        (Aval((3,), "bf16"), r"x must be \[T, F\], 2 axes: got bf16\[3\], 1 axes"),
    ],
)
def test_shapes_that_are_refused(aval, message):
    with pytest.raises(ShapeError, match="all_gather: " + message):
        ops.AllGather(5, Group("tp", 2)).infer(aval)
