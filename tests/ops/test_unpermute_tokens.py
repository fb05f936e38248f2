"""`ops.UnpermuteTokens`: bring the experts' rows back to their tokens, weighted."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, Group, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, on_cpu, strided


def oracle(rows, source, weights):
    out = np.zeros((len(source), rows.shape[1]))
    for t, of_token in enumerate(source):
        for u, g in enumerate(of_token):
            if g >= 0:
                out[t] += weights[t, u] * rows[g]
    return out


def sources(tokens, *of_tokens):
    return torch.tensor(of_tokens, dtype=torch.int32).reshape(tokens, -1)


def verify(rules, rng, source, layout=torch.clone):
    """Rows that no pair has, and weights of pairs of other ranks, are poison."""
    rows, weights = rules.random(rng, source.numel(), 5), rules.random(rng, *source.shape, dtype=rules.wide)
    rows[sorted(set(range(source.numel())) - set(source.flatten().tolist()))] = math.nan
    weights[source < 0] = math.nan
    (got,) = rules(ops.UnpermuteTokens(), layout(rows), layout(source), layout(weights))
    rules.close(got, oracle(exact(rows), source.tolist(), exact(weights)))
    return got


@each(("tokens", "top_k", "elsewhere"), [(3, 2, 0), (5, 3, 7), (1, 4, 2), (2, 1, 1), (19, 8, 100)])
@each("layout", [torch.clone, strided])
def test_weighted_sum_over_the_experts(rules, rng, tokens, top_k, elsewhere, layout):
    pairs = tokens * top_k
    source = np.full(pairs, -1)
    source[rng.permutation(pairs)[: pairs - elsewhere]] = rng.permutation(pairs - elsewhere)
    verify(rules, rng, sources(tokens, *source), layout)


def test_tokens_without_an_expert_on_the_rank(rules, rng):
    got = verify(rules, rng, sources(4, [-1, -1], [1, 0], [-1, -1], [-1, 2]))
    assert not got[[0, 2]].any() and got[[1, 3]].all()


@each("tokens", [0, 1, 3])
def test_no_pair_on_the_rank(rules, rng, tokens):
    got = verify(rules, rng, torch.full((tokens, 2), -1, dtype=torch.int32))
    assert got.shape == (tokens, 5) and not got.any()


def test_nan_of_an_expert_reaches_its_token_only(rules, rng):
    rows, weights = rules.random(rng, 4, 3), rules.random(rng, 2, 2, dtype=rules.wide)
    rows[2, 1] = math.nan
    (got,) = rules(ops.UnpermuteTokens(), rows, sources(2, 0, 1, 2, 3), weights)
    assert got.isnan().tolist() == [[False] * 3, [False, True, False]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(dtype):
    """A big number hides each small one in 16 bits, not their sum."""
    rows = torch.ones(9, 1, dtype=dtype)
    weights = torch.tensor([[1.0, *[torch.finfo(dtype).eps / 4] * 8]])
    (got,) = on_cpu(dtype)(ops.UnpermuteTokens(), rows, sources(1, *range(9)), weights)
    assert got.item() == 1 + 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_not_rounded(dtype):
    """Weights and products are float32: in 16 bits the two would be equal and cancel."""
    rows = torch.tensor([[1.0], [-1.0]], dtype=dtype)
    weights = torch.tensor([[1 + 2.0**-20, 1.0]])
    (got,) = on_cpu(dtype)(ops.UnpermuteTokens(), rows, sources(1, 0, 1), weights)
    assert got.item() == 2.0**-20


def experts_of(rng, tokens, top_k, count):
    return torch.tensor(np.array([rng.permutation(count)[:top_k] for _ in range(tokens)]), dtype=torch.int32)


def through_the_experts(rules, x, experts, weights, weight, ranks):
    """Permute, project and unpermute on every rank, and add up; what nobody is to read is poison."""
    own, total = len(weight) // ranks, np.zeros((len(x), weight.shape[1]))
    for rank in range(ranks):
        rows, counts, source = rules(ops.PermuteTokens(own, Group("ep", ranks)), x, experts, rank=rank)
        rows[int(counts.sum()) :] = math.nan
        (out,) = rules(ops.GroupedLinear(), rows, weight[rank * own : (rank + 1) * own], counts)
        out[int(counts.sum()) :] = math.nan
        total += exact(rules(ops.UnpermuteTokens(), out, source, weights)[0])
    return total


@each("ranks", [1, 2, 3, 6])
@each(("tokens", "top_k"), [(7, 3), (1, 6), (1, 1)])
def test_there_and_back(rules, rng, ranks, tokens, top_k):
    """Small integers: exact in every dtype, so the experts' ways must all be found."""
    experts = experts_of(rng, tokens, top_k, 6)
    x, weights = rng.integers(-3, 4, (tokens, 4)), rng.integers(1, 5, (tokens, top_k)) / 4
    given = rules.tensor(x), experts, rules.tensor(weights, rules.wide)
    identity = rules.tensor(np.broadcast_to(np.eye(4), (6, 4, 4)).copy())
    got = through_the_experts(rules, *given, identity, ranks)
    np.testing.assert_array_equal(got, weights.sum(1, keepdims=True) * x)
    # Expert e multiplies by e + 1: a row that went to the wrong expert, or came back to the wrong pair, is seen.
    scaled = identity * torch.arange(1, 7).to(rules.dtype).view(6, 1, 1)
    got = through_the_experts(rules, *given, scaled, ranks)
    np.testing.assert_array_equal(got, (weights * (experts.numpy() + 1)).sum(1, keepdims=True) * x)


AVALS = {"rows": Aval((12, 8), "bf16"), "source": Aval((3, 4), "int32"), "weights": Aval((3, 4), "fp32")}


def test_shapes():
    op = ops.UnpermuteTokens()
    assert op.infer(*AVALS.values()) == (Aval((3, 8), "bf16"),)
    assert op.infer(*(aval.with_float("fp64") for aval in AVALS.values())) == (Aval((3, 8), "fp64"),)


@pytest.mark.parametrize(
    ("operand", "aval", "message"),
    [
        ("rows", Aval((11, 8), "bf16"), r"axis Z of rows must be T U = 12, from source: got 11"),
        ("rows", Aval((12, 8), "fp64"), r"weights must be fp64, to go with rows, fp64: got fp32"),
        ("rows", Aval((12, 8), "int8"), r"rows must be floating \(bf16, fp16, fp32, fp64\): got int8"),
        ("rows", Aval((3, 4, 8), "bf16"), r"rows must be \[Z, D\], 2 axes: got bf16\[3, 4, 8\], 3 axes"),
        ("source", Aval((3, 4), "int64"), r"source must be int32: got int64"),
        ("weights", Aval((3, 4), "bf16"), r"weights must be fp32, to go with rows, bf16: got bf16"),
        ("weights", Aval((3, 3), "fp32"), r"axis U .* 4 in source, 3 in weights"),
        ("weights", Aval((4, 4), "fp32"), r"axis T .* 3 in source, 4 in weights"),
    ],
)
def test_shapes_that_are_refused(operand, aval, message):
    with pytest.raises(ShapeError, match="unpermute_tokens: " + message):
        ops.UnpermuteTokens().infer(*(AVALS | {operand: aval}).values())
