"""`ops.JoinTokens`: two micro-batches in one, and the inverse of the split."""

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided


@each(("tokens", "others"), [(3, 2), (1, 1), (4, 0), (0, 4), (0, 0)])
@each("layout", [torch.clone, strided])
def test_one_below_the_other(rules, rng, tokens, others, layout):
    first, rest = rules.random(rng, tokens, 3), rules.random(rng, others, 3)
    (got,) = rules(ops.JoinTokens(), layout(first), layout(rest))
    assert len(got) == tokens + others
    for t in range(tokens + others):
        want = exact(first)[t] if t < tokens else exact(rest)[t - tokens]
        np.testing.assert_array_equal(exact(got[t]), want)


def test_what_was_split_is_joined(rules, rng):
    x = rules.random(rng, 5, 3)
    assert torch.equal(rules(ops.JoinTokens(), *rules(ops.SplitTokens(3), x))[0], x)


def test_shapes():
    op = ops.JoinTokens()
    assert op.infer(Aval((3, 8), "fp16"), Aval((2, 8), "fp16")) == (Aval((5, 8), "fp16"),)
    with pytest.raises(ShapeError, match=r"join_tokens: axis D .* 8 in first, 7 in rest"):
        op.infer(Aval((3, 8), "fp16"), Aval((2, 7), "fp16"))
    with pytest.raises(ShapeError, match="join_tokens: rest must have the dtype of first, fp16: got fp32"):
        op.infer(Aval((3, 8), "fp16"), Aval((2, 8), "fp32"))
