"""`ops.AllReduce`: sum over the ranks, the same bits on each."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, Group, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, on_cpu, strided


@each("ranks", [1, 2, 5])
@each("tokens", [0, 1, 3])
@each("layout", [torch.clone, strided])
def test_sum_over_the_ranks(rules, rng, ranks, tokens, layout):
    given = [rules.random(rng, tokens, 4) for _ in range(ranks)]
    before = [x.clone() for x in given]
    results = rules.group(ops.AllReduce(Group("tp", ranks)), [(layout(x),) for x in given])
    want = np.zeros((tokens, 4))
    for x in given:
        want += exact(x)
    for (got,) in results:
        rules.close(got, want)
        assert torch.equal(got, results[0][0])
    assert all(map(torch.equal, given, before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(dtype):
    """A big number hides each small one in 16 bits, not their sum."""
    small = torch.full((1, 1), torch.finfo(dtype).eps / 4, dtype=dtype)
    given = [(torch.ones(1, 1, dtype=dtype),), *[(small,)] * 8]
    results = on_cpu(dtype).group(ops.AllReduce(Group("tp", 9)), given)
    assert results[0][0].item() == 1 + 2 * torch.finfo(dtype).eps


def test_in_rank_order():
    """Float32 addition is not associative: (1e8 - 1e8) + 1 is 1, 1e8 + (-1e8 + 1) is 0."""
    op, numbers = ops.AllReduce(Group("tp", 3)), [torch.tensor([[x]]) for x in (1e8, -1e8, 1.0)]
    assert on_cpu(torch.float32).group(op, [(x,) for x in numbers])[2][0].item() == 1
    assert on_cpu(torch.float32).group(op, [(numbers[i],) for i in (2, 0, 1)])[0][0].item() == 0


def test_nan_of_one_rank_reaches_all(rules):
    x = rules.tensor([[1.0, 2.0]])
    poisoned = rules.tensor([[math.nan, 2.0]])
    for (got,) in rules.group(ops.AllReduce(Group("tp", 2)), [(x,), (poisoned,)]):
        rules.close(got, [[math.nan, 4.0]])


def test_shapes():
    op = ops.AllReduce(Group("tp", 2))
    assert op.infer(Aval((3, 4), "fp16")) == (Aval((3, 4), "fp16"),)
    with pytest.raises(ShapeError, match=r"all_reduce: x must be floating \(bf16, .*\): got int32"):
        op.infer(Aval((3, 4), "int32"))
    with pytest.raises(ShapeError, match=r"all_reduce: x must be \[T, D\], 2 axes: got bf16\[4\], 1 axes"):
        op.infer(Aval((4,), "bf16"))
