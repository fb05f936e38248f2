"""`ops.Linear`: projection with a checkpoint weight."""

import numpy as np
import pytest

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided


def oracle(x, weight):
    out = np.zeros((len(x), len(weight)))
    for t, row in enumerate(x):
        for f, column in enumerate(weight):
            out[t, f] = sum(a * b for a, b in zip(row, column, strict=True))
    return out


@each("shape", [(3, 5, 4), (1, 64, 9), (0, 5, 4), (2, 1, 1)])
def test_linear(rules, rng, shape):
    tokens, features, out = shape
    x, weight = rules.random(rng, tokens, features), rules.random(rng, out, features)
    (got,) = rules(ops.Linear(), x, weight)
    rules.close(got, oracle(exact(x), exact(weight)))


def test_strided_operands(rules, rng):
    x, weight = rules.random(rng, 3, 5), rules.random(rng, 4, 5)
    (got,) = rules(ops.Linear(), strided(x), strided(weight))
    rules.close(got, oracle(exact(x), exact(weight)))


def test_shapes():
    op = ops.Linear()
    assert op.infer(Aval((3, 5), "bf16"), Aval((4, 5), "bf16")) == (Aval((3, 4), "bf16"),)
    with pytest.raises(ShapeError, match=r"linear: axis D .* 5 in x, 6 in weight"):
        op.infer(Aval((3, 5), "bf16"), Aval((4, 6), "bf16"))
    with pytest.raises(ShapeError, match=r"linear: weight must have the dtype of x, bf16: got fp32"):
        op.infer(Aval((3, 5), "bf16"), Aval((4, 5), "fp32"))
    with pytest.raises(ShapeError, match=r"linear: x must be \[T, D\], 2 axes: got bf16\[3, 5, 1\], 3 axes"):
        op.infer(Aval((3, 5, 1), "bf16"), Aval((4, 5), "bf16"))
    with pytest.raises(ShapeError, match=r"linear takes 2 operands \(x, weight\): got 1"):
        op.infer(Aval((3, 5), "bf16"))
