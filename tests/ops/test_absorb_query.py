"""`ops.AbsorbQuery`: W_UK folded into the query."""

import numpy as np
import pytest

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided

SENSE = {"rope": 2}
NONSENSE = {"rope": (-1, 2.0, "2", None, True)}


def oracle(q, w_uk, rope):
    heads, nope, latent = w_uk.shape
    out = np.zeros((len(q), heads, latent))
    for t in range(len(q)):
        for n in range(heads):
            for feature in range(latent):
                start = n * (nope + rope)
                out[t, n, feature] = sum(q[t, start + p] * w_uk[n, p, feature] for p in range(nope))
    return out


@each("tokens", [0, 1, 3])
@each("heads", [1, 2, 5])
def test_absorb_query(rules, rng, tokens, heads):
    q, w_uk = rules.random(rng, tokens, heads * 6), rules.random(rng, heads, 4, 7)
    q.view(tokens, heads, 6)[..., 4:] = np.nan  # the part with position is not read
    (got,) = rules(ops.AbsorbQuery(rope=2), q, w_uk)
    rules.close(got, oracle(exact(q), exact(w_uk), 2))


def test_scores_are_those_of_expanded_keys(rules, rng):
    """q_nope . (w_uk c) = (absorbed q) . c."""
    q, w_uk = rules.random(rng, 2, 3 * 6), rules.random(rng, 3, 4, 7)
    key = rng.standard_normal(7)
    (got,) = rules(ops.AbsorbQuery(rope=2), q, w_uk)
    expanded = exact(w_uk) @ key  # [heads, nope]
    want = (exact(q).reshape(2, 3, 6)[..., :4] * expanded).sum(-1)
    np.testing.assert_allclose(exact(got) @ key, want, atol={2: 0.1, 4: 1e-5, 8: 1e-12}[q.element_size()])


def test_strided_operands(rules, rng):
    q, w_uk = rules.random(rng, 3, 12), rules.random(rng, 2, 4, 7)
    (got,) = rules(ops.AbsorbQuery(rope=2), strided(q), strided(w_uk))
    rules.close(got, oracle(exact(q), exact(w_uk), 2))


def test_shapes():
    op = ops.AbsorbQuery(rope=64)
    q, w_uk = Aval((4, 16 * 192), "bf16"), Aval((16, 128, 512), "bf16")
    assert op.infer(q, w_uk) == (Aval((4, 16, 512), "bf16"),)
    message = r"absorb_query: axis 1 of q must be N \* \(P \+ R\) = 16 \* .* = 3072: got 3000"
    with pytest.raises(ShapeError, match=message):
        op.infer(Aval((4, 3000), "bf16"), w_uk)
    with pytest.raises(ShapeError, match=r"absorb_query: w_uk must have the dtype of q, bf16: got fp32"):
        op.infer(q, Aval((16, 128, 512), "fp32"))
