"""`ops.VUp`: latents of every head projected up to values."""

import numpy as np
import pytest

from mla_fx.effects import Aval, Group, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided

SENSE = {"flat": False}
NONSENSE = {"flat": (1, 0, None, "False")}


def oracle(attn, w_uv):
    heads, latent, value = w_uv.shape
    out = np.zeros((len(attn), heads * value))
    for t in range(len(attn)):
        for n in range(heads):
            for v in range(value):
                out[t, n * value + v] = sum(attn[t, n, i] * w_uv[n, i, v] for i in range(latent))
    return out


@each("tokens", [0, 1, 3])
@each("heads", [1, 3])
def test_v_up(rules, rng, tokens, heads):
    attn, w_uv = rules.random(rng, tokens, heads, 7), rules.random(rng, heads, 7, 4)
    (got,) = rules(ops.VUp(), attn, w_uv)
    rules.close(got, oracle(exact(attn), exact(w_uv)))


def test_strided_operands(rules, rng):
    attn, w_uv = rules.random(rng, 3, 2, 7), rules.random(rng, 2, 7, 4)
    (got,) = rules(ops.VUp(), strided(attn), strided(w_uv))
    rules.close(got, oracle(exact(attn), exact(w_uv)))


@each("rank", [0, 1, 2])
@each("flat", [True, False])
def test_own_heads_of_all(rules, rng, rank, flat):
    """Of a group's weight the rank takes its own heads; not flat, they stay apart."""
    attn, w_uv = rules.random(rng, 3, 2, 7), rules.random(rng, 6, 7, 4)
    (got,) = rules(ops.VUp(Group("dcp", 3), flat), attn, w_uv, rank=rank)
    want = oracle(exact(attn), exact(w_uv)[2 * rank : 2 * rank + 2])
    rules.close(got, want if flat else want.reshape(3, 2, 4))


@each("tokens", [0, 3])
def test_heads_apart(rules, rng, tokens):
    attn, w_uv = rules.random(rng, tokens, 2, 7), rules.random(rng, 2, 7, 4)
    (got,) = rules(ops.VUp(flat=False), strided(attn), strided(w_uv))
    rules.close(got, oracle(exact(attn), exact(w_uv)).reshape(tokens, 2, 4))


def test_shapes():
    op = ops.VUp()
    attn, w_uv = Aval((4, 16, 512), "fp16"), Aval((16, 512, 128), "fp16")
    assert op.infer(attn, w_uv) == (Aval((4, 2048), "fp16"),)
    assert op.infer(Aval((0, 16, 512), "fp16"), w_uv) == (Aval((0, 2048), "fp16"),)
    with pytest.raises(ShapeError, match=r"v_up: axis H of w_uv must be 8, for the 8 heads of attn: got 16"):
        op.infer(Aval((4, 8, 512), "fp16"), w_uv)
    group = ops.VUp(Group("dcp", 2), flat=False)
    assert group.infer(Aval((4, 8, 512), "fp16"), w_uv) == (Aval((4, 8, 128), "fp16"),)
    with pytest.raises(
        ShapeError, match=r"v_up: axis H of w_uv must be 32, for the 16 heads of attn on each of dcp\[2\]"
    ):
        group.infer(attn, w_uv)
    with pytest.raises(ShapeError, match=r"v_up: axis L .* 511 in attn, 512 in w_uv"):
        op.infer(Aval((4, 16, 511), "fp16"), w_uv)
    with pytest.raises(ShapeError, match=r"v_up: w_uv must have the dtype of attn, fp16: got bf16"):
        op.infer(attn, Aval((16, 512, 128), "bf16"))
