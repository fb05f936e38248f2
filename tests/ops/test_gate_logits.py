"""`ops.GateLogits`: affinity of every token to every expert, in float32 whatever the activations are."""

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, on_cpu, strided


def oracle(x, weight):
    out = np.zeros((len(x), len(weight)))
    for t, row in enumerate(x):
        for e, expert in enumerate(weight):
            out[t, e] = sum(a * b for a, b in zip(row, expert, strict=True))
    return out


@each(("tokens", "features", "experts"), [(3, 5, 4), (1, 64, 9), (0, 5, 4), (2, 1, 1), (9, 33, 16)])
@each("layout", [torch.clone, strided])
def test_gate_logits(rules, rng, tokens, features, experts, layout):
    """With 16-bit operands as exact as with float32: neither the products nor the logits are rounded to 16 bits."""
    x, weight = rules.random(rng, tokens, features), rules.random(rng, experts, features)
    (got,) = rules(ops.GateLogits(), layout(x), layout(weight))
    assert got.dtype == rules.wide
    rules.close(got, oracle(exact(x), exact(weight)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_widened_first(rng, dtype):
    """What the rule gives for the float32 operands of the same values, bit for bit."""
    x, weight = (torch.as_tensor(rng.standard_normal((n, 512))).to(dtype) for n in (5, 24))
    (got,) = on_cpu(dtype)(ops.GateLogits(), x, weight)
    (want,) = on_cpu(torch.float32)(ops.GateLogits(), x.float(), weight.float())
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


def test_logits_that_sixteen_bits_would_confuse(rules):
    """1 + 2^-12 and 1 + 2^-11 are two experts; in either 16-bit dtype they would be one."""
    x, weight = rules.tensor([[1.0, 2.0**-6]]), rules.tensor([[1.0, 2.0**-6], [1.0, 2.0**-5]])
    (got,) = rules(ops.GateLogits(), x, weight)
    assert got.tolist() == [[1 + 2.0**-12, 1 + 2.0**-11]]


def test_shapes():
    op = ops.GateLogits()
    for dtype, wide in (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")):
        assert op.infer(Aval((3, 5), dtype), Aval((8, 5), dtype)) == (Aval((3, 8), wide),)
    with pytest.raises(ShapeError, match=r"gate_logits: axis D .* 5 in x, 6 in weight"):
        op.infer(Aval((3, 5), "bf16"), Aval((8, 6), "bf16"))
    with pytest.raises(ShapeError, match=r"gate_logits: weight must have the dtype of x, bf16: got fp32"):
        op.infer(Aval((3, 5), "bf16"), Aval((8, 5), "fp32"))
    with pytest.raises(ShapeError, match=r"gate_logits: x must be floating \(bf16, .*\): got int8"):
        op.infer(Aval((3, 5), "int8"), Aval((8, 5), "int8"))
    with pytest.raises(ShapeError, match=r"gate_logits: weight must be \[X, D\], 2 axes: got bf16\[5\], 1 axes"):
        op.infer(Aval((3, 5), "bf16"), Aval((5,), "bf16"))
