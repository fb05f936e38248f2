"""`ops.SplitTokens`: the tokens of a step as two micro-batches."""

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided

SENSE = {"count": 2}
NONSENSE = {"count": (-1, 1.0, "1", None, True)}


@each(("tokens", "count"), [(5, 3), (2, 1), (4, 0), (4, 4), (0, 0)])
@each("layout", [torch.clone, strided])
def test_first_and_rest(rules, rng, tokens, count, layout):
    x = rules.random(rng, tokens, 3)
    first, rest = rules(ops.SplitTokens(count), layout(x))
    for t in range(tokens):
        got = first[t] if t < count else rest[t - count]
        np.testing.assert_array_equal(exact(got), exact(x)[t])


def test_parts_are_copies(rules, rng):
    """One part may be let go of while the other is still read."""
    x = rules.random(rng, 4, 3)
    before = x.clone()
    first, rest = rules(ops.SplitTokens(2), x)
    assert first.untyped_storage().data_ptr() != rest.untyped_storage().data_ptr()
    first.zero_()
    rest.zero_()
    assert torch.equal(x, before)


def test_shapes():
    assert ops.SplitTokens(3).infer(Aval((5, 8), "fp16")) == (Aval((3, 8), "fp16"), Aval((2, 8), "fp16"))
    with pytest.raises(ShapeError, match="split_tokens: axis T of x must be at least count, 6: got 5"):
        ops.SplitTokens(6).infer(Aval((5, 8), "fp16"))
