"""`ops.GatherHeads`: the queries of all heads, on every rank."""

import pytest
import torch

from mla_fx.effects import Aval, Group, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import strided


@each("ranks", [1, 2, 4])
@each("tokens", [0, 1, 3])
@each("layout", [torch.clone, strided])
def test_heads_in_rank_order(rules, rng, ranks, tokens, layout):
    own = 2
    queries = [(rules.random(rng, tokens, own, 5), rules.random(rng, tokens, own, 3)) for _ in range(ranks)]
    results = rules.group(ops.GatherHeads(Group("dcp", ranks)), [(layout(q), layout(r)) for q, r in queries])
    for got in results:
        for rank in range(ranks):
            for t in range(tokens):
                for n in range(own):
                    for part in range(2):
                        assert torch.equal(got[part][t, rank * own + n], queries[rank][part][t, n])


def test_shapes():
    op, q_latent, q_rope = ops.GatherHeads(Group("dcp", 4)), Aval((4, 16, 512), "bf16"), Aval((4, 16, 64), "bf16")
    assert op.infer(q_latent, q_rope) == (
        Aval((4, 64, 512), "bf16"),
        Aval((4, 64, 64), "bf16"),
    )
    with pytest.raises(ShapeError, match=r"gather_heads: axis N .* 16 in q_latent, 8 in q_rope"):
        op.infer(q_latent, Aval((4, 8, 64), "bf16"))
    with pytest.raises(ShapeError, match=r"gather_heads: q_rope must have the dtype of q_latent, bf16: got fp16"):
        op.infer(q_latent, Aval((4, 16, 64), "fp16"))
