"""`ops.PermuteTokens`: bring the tokens of this rank's experts together, expert after expert."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, Group, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided

SENSE = {"own": 3}
NONSENSE = {"own": (0, -7, 3.0, "3", None, True)}


def draw(rng, tokens, top_k, count):
    """Different experts for each token, as gating gives them, in any order."""
    chosen = [rng.permutation(count)[:top_k] for _ in range(tokens)]
    return torch.tensor(np.array(chosen).reshape(tokens, top_k), dtype=torch.int32)


def oracle(x, experts, own, rank):
    """Rows of this rank's pairs only, counts, source."""
    pairs = [(expert, t, u) for t, row in enumerate(experts) for u, expert in enumerate(row)]
    mine = sorted(pair for pair in pairs if rank * own <= pair[0] < (rank + 1) * own)
    counts, source = [0] * own, [[-1] * len(row) for row in experts]
    for g, (expert, t, u) in enumerate(mine):
        counts[expert - rank * own] += 1
        source[t][u] = g
    return np.array([x[t] for _, t, _ in mine]).reshape(len(mine), x.shape[1]), counts, source


def verify(rules, x, experts, own, ranks, layout=torch.clone):
    """On every rank; rows behind the last pair hold anything.  Returns the pairs of each rank."""
    pairs = []
    for rank in range(ranks):
        rows, counts, source = rules(ops.PermuteTokens(own, Group("ep", ranks)), layout(x), layout(experts), rank=rank)
        want, want_counts, want_source = oracle(exact(x), experts.tolist(), own, rank)
        assert counts.tolist() == want_counts
        assert source.tolist() == want_source
        np.testing.assert_array_equal(exact(rows)[: len(want)], want)
        pairs.append(len(want))
    return pairs


#: Tokens, experts a token, experts on a rank, ranks.
CASES = [(3, 2, 4, 1), (5, 3, 2, 2), (1, 4, 2, 3), (17, 6, 3, 4), (4, 1, 1, 5), (2, 3, 1, 3), (0, 2, 2, 2)]


@each(("tokens", "top_k", "own", "ranks"), CASES)
@each("layout", [torch.clone, strided])
def test_sorted_by_expert_and_token(rules, rng, tokens, top_k, own, ranks, layout):
    experts = draw(rng, tokens, top_k, own * ranks)
    pairs = verify(rules, rules.random(rng, tokens, 3), experts, own, ranks, layout)
    assert sum(pairs) == tokens * top_k


@each("rank", [0, 1, 2])
def test_all_pairs_on_one_rank(rules, rng, rank):
    """It then has a row for every pair, and the others have none."""
    experts = draw(rng, 6, 3, 3) + 3 * rank
    pairs = verify(rules, rules.random(rng, 6, 4), experts, 3, 3)
    assert pairs == [18 if r == rank else 0 for r in range(3)]


def test_experts_without_tokens(rules):
    """Before, between and behind those that have some."""
    experts = torch.tensor([[6, 2], [2, 6], [6, 9]], dtype=torch.int32)
    x = rules.tensor([[1.0], [2.0], [3.0]])
    rows, counts, source = rules(ops.PermuteTokens(8, Group("ep", 2)), x, experts, rank=0)
    assert counts.tolist() == [0, 0, 2, 0, 0, 0, 3, 0]
    assert rows[:5].flatten().tolist() == [1, 2, 1, 2, 3]
    assert source.tolist() == [[2, 0], [1, 3], [4, -1]]


def test_one_expert_for_all_keeps_the_order_of_tokens(rules, rng):
    """More pairs than a sort that is not stable would leave in order; a token may even ask for an expert twice."""
    x, experts = rules.random(rng, 150, 2), torch.full((150, 2), 3, dtype=torch.int32)
    rows, counts, source = rules(ops.PermuteTokens(2, Group("ep", 2)), x, experts, rank=1)
    assert counts.tolist() == [0, 300]
    assert source.flatten().tolist() == list(range(300))
    assert torch.equal(rows, x.repeat_interleave(2, 0))


def test_poison_of_other_ranks_stays_behind(rules):
    x = rules.tensor([[math.nan, 1.0], [3.0, 4.0], [math.inf, 2.0]])
    experts = torch.tensor([[0, 1], [2, 1], [0, 0]], dtype=torch.int32)
    rows, counts, source = rules(ops.PermuteTokens(2, Group("ep", 2)), x, experts, rank=1)
    assert counts.tolist() == [1, 0]
    assert source.tolist() == [[-1, -1], [0, -1], [-1, -1]]
    assert rows[0].tolist() == [3, 4]


def test_operands_stay_as_they_were(rules, rng):
    x, experts = rules.random(rng, 4, 3), draw(rng, 4, 2, 6)
    before = x.clone(), experts.clone()
    verify(rules, x, experts, 3, 2, lambda operand: operand)
    assert torch.equal(x, before[0]) and torch.equal(experts, before[1])


AVALS = {"x": Aval((3, 8), "bf16"), "experts": Aval((3, 4), "int32")}


def test_shapes():
    assert ops.PermuteTokens(own=5, group=Group("ep", 2)).infer(*AVALS.values()) == (
        Aval((12, 8), "bf16"),
        Aval((5,), "int64"),
        Aval((3, 4), "int32"),
    )


@pytest.mark.parametrize(
    ("operand", "aval", "message"),
    [
        ("x", Aval((2, 8), "bf16"), r"axis T .* 2 in x, 3 in experts"),
        ("x", Aval((3, 8), "int32"), r"x must be floating \(bf16, fp16, fp32, fp64\): got int32"),
        ("x", Aval((3,), "bf16"), r"x must be \[T, D\], 2 axes: got bf16\[3\], 1 axes"),
        ("experts", Aval((3, 4), "int64"), r"experts must be int32: got int64"),
        ("experts", Aval((3,), "int32"), r"experts must be \[T, U\], 2 axes: got int32\[3\], 1 axes"),
    ],
)
def test_shapes_that_are_refused(operand, aval, message):
    with pytest.raises(ShapeError, match="permute_tokens: " + message):
        ops.PermuteTokens(own=5, group=Group("ep", 2)).infer(*(AVALS | {operand: aval}).values())
