"""`ops.Rope`: rotate the end of every head."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, on_cpu, strided

SENSE = {"heads": 2}
NONSENSE = {"heads": (0, -2, 2.0, "2", True)}


def oracle(x, cos, sin, heads):
    """Every pair as a complex number, turned by its angle."""
    tokens, half = cos.shape[0], cos.shape[1] // 2
    rows = x.reshape(tokens, heads or 1, x.shape[1] // (heads or 1))
    out = np.zeros((tokens, heads or 1, 2 * half))
    for t in range(tokens):
        for h, row in enumerate(rows[t]):
            pairs = row[len(row) - 2 * half :]
            for i in range(half):
                pair = complex(pairs[2 * i], pairs[2 * i + 1])
                out[t, h, i] = (pair * complex(cos[t, i], sin[t, i])).real
                out[t, h, half + i] = (pair * complex(cos[t, half + i], sin[t, half + i])).imag
    return out if heads is not None else out[:, 0]


def angles(rules, rng, tokens, features, kind=None):
    """An angle of its own for each feature: which one it takes is part of the formula."""
    turn = rng.uniform(0, 2 * math.pi, (tokens, features))
    return rules.tensor(np.cos(turn), kind or rules.wide), rules.tensor(np.sin(turn), kind or rules.wide)


@each("heads", [None, 1, 3])
@each("tokens", [0, 1, 4])
@each("nope", [0, 5])
@each("rounded", [False, True])
def test_rope(rules, rng, tokens, heads, nope, rounded):
    x = rules.random(rng, tokens, (heads or 1) * (nope + 6))
    x.view(tokens, heads or 1, nope + 6)[..., :nope] = math.nan  # not read
    cos, sin = angles(rules, rng, tokens, 6, rules.dtype if rounded else None)
    (got,) = rules(ops.Rope(heads), x, cos, sin)
    rules.close(got, oracle(exact(x), exact(cos), exact(sin), heads))


def test_row_of_the_contract(rules):
    """Position 3, four features, theta 10000; pairs leave de-interleaved."""
    turn = [[3.0, 3.0 * 10000**-0.5] * 2]
    cos, sin = rules.tensor(np.cos(turn), rules.wide), rules.tensor(np.sin(turn), rules.wide)
    (got,) = rules(ops.Rope(None), rules.tensor([[1.0, 2, 3, 4]]), cos, sin)
    tolerance = 2**-8 if got.element_size() == 2 else 4e-5
    np.testing.assert_allclose(exact(got)[0], [-1.2722, 2.8787, -1.8389, 4.0882], rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounded", [False, True])
def test_computed_wide(rng, dtype, rounded):
    """The result is that of the values of `x` and of the angles in float32, rounded."""
    x = torch.as_tensor(rng.standard_normal((3, 8))).to(dtype)
    turn = torch.as_tensor(rng.uniform(0, 6, (3, 4)))
    cos, sin = (part.to(dtype if rounded else torch.float32) for part in (turn.cos(), turn.sin()))
    (got,) = on_cpu(dtype)(ops.Rope(2), x, cos, sin)
    (wide,) = on_cpu(torch.float32)(ops.Rope(2), x.float(), cos.float(), sin.float())
    assert torch.equal(got, wide.to(dtype))


def test_strided_operands(rules, rng):
    x, (cos, sin) = rules.random(rng, 3, 16), angles(rules, rng, 3, 6)
    (got,) = rules(ops.Rope(2), strided(x), strided(cos), strided(sin))
    rules.close(got, oracle(exact(x), exact(cos), exact(sin), 2))


def test_shapes():
    cos, short = Aval((4, 64), "fp32"), Aval((4, 64), "bf16")
    assert ops.Rope(16).infer(Aval((4, 16 * 192), "bf16"), short, short) == (Aval((4, 16, 64), "bf16"),)
    assert ops.Rope(16).infer(Aval((4, 16 * 192), "bf16"), cos, cos) == (Aval((4, 16, 64), "bf16"),)
    assert ops.Rope(None).infer(Aval((4, 576), "bf16"), cos, cos) == (Aval((4, 64), "bf16"),)
    with pytest.raises(ShapeError, match=r"rope: axis T .* 3 in x, 4 in cos"):
        ops.Rope(None).infer(Aval((3, 576), "bf16"), cos, cos)
    with pytest.raises(ShapeError, match=r"rope: axis R .*qk_rope_head_dim.* 64 in cos, 16 in sin"):
        ops.Rope(None).infer(Aval((4, 576), "bf16"), cos, Aval((4, 16), "fp32"))
    with pytest.raises(ShapeError, match=r"rope: axis R of cos must be even: got 63"):
        ops.Rope(None).infer(Aval((4, 576), "bf16"), *[Aval((4, 63), "fp32")] * 2)
    with pytest.raises(ShapeError, match=r"rope: axis 1 of x must be 5 heads of at least R = 64 features: got 576"):
        ops.Rope(5).infer(Aval((4, 576), "bf16"), cos, cos)
    with pytest.raises(ShapeError, match=r"rope: axis 1 of x must be 16 heads of at least R = 64 features: got 576"):
        ops.Rope(16).infer(Aval((4, 576), "bf16"), cos, cos)
    with pytest.raises(ShapeError, match=r"rope: sin must be bf16 or fp32, to go with x, bf16: got fp64"):
        ops.Rope(None).infer(Aval((4, 576), "bf16"), cos, Aval((4, 64), "fp64"))
    with pytest.raises(ShapeError, match=r"rope: x must be floating \(bf16, .*\): got int32"):
        ops.Rope(None).infer(Aval((4, 576), "int32"), cos, cos)
