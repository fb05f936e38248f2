"""`ops.LocalHeads`: a rank's own heads."""

import pytest
import torch

from mla_fx.effects import Aval, Group, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import strided


@each("ranks", [1, 2, 3])
@each("tokens", [0, 1, 2])
@each("layout", [torch.clone, strided])
def test_own_heads(rules, rng, ranks, tokens, layout):
    q = rules.random(rng, tokens, 6, 5)
    for rank in range(ranks):
        (got,) = rules(ops.LocalHeads(Group("dcp", ranks)), layout(q), rank=rank)
        for n in range(6 // ranks):
            assert torch.equal(got[:, n], q[:, rank * (6 // ranks) + n])


def test_shapes():
    assert ops.LocalHeads(Group("dcp", 4)).infer(Aval((3, 16, 512), "bf16")) == (Aval((3, 4, 512), "bf16"),)
    with pytest.raises(ShapeError, match=r"local_heads: axis H of q must be a multiple of dcp\[3\]: got 16"):
        ops.LocalHeads(Group("dcp", 3)).infer(Aval((3, 16, 512), "bf16"))
    with pytest.raises(ShapeError, match=r"local_heads: q must be floating \(bf16, .*\): got int64"):
        ops.LocalHeads(Group("dcp", 4)).infer(Aval((3, 16, 512), "int64"))
