"""`ops.Add`: the residual."""

import pytest

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided


@each("tokens", [0, 1, 3])
def test_add(rules, rng, tokens):
    x, y = rules.random(rng, tokens, 5), rules.random(rng, tokens, 5)
    rules.close(rules(ops.Add(), x, y)[0], exact(x) + exact(y))


def test_strided_operands(rules, rng):
    x, y = rules.random(rng, 3, 5), rules.random(rng, 3, 5)
    rules.close(rules(ops.Add(), strided(x), strided(y))[0], exact(x) + exact(y))


def test_shapes():
    x = Aval((3, 5), "bf16")
    assert ops.Add().infer(x, x) == (x,)
    with pytest.raises(ShapeError, match=r"add: axis T .* 3 in x, 1 in y"):
        ops.Add().infer(x, Aval((1, 5), "bf16"))
    with pytest.raises(ShapeError, match=r"add: axis D .* 5 in x, 1 in y"):
        ops.Add().infer(x, Aval((3, 1), "bf16"))
    with pytest.raises(ShapeError, match=r"add: y must have the dtype of x, bf16: got fp16"):
        ops.Add().infer(x, Aval((3, 5), "fp16"))
