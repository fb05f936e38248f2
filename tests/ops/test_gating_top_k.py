"""`ops.GatingTopK`: which experts a token goes to, and with what weights."""

import itertools
import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided

SENSE = {
    "top_k": 2,
    "groups": 4,
    "top_groups": 2,
    "scoring": "softmax",
    "group_score": "max",
    "normalise": False,
    "scale": 2.5,
}
NONSENSE = {
    "top_k": (0, -2, 2.0, "2", None, True),
    "groups": (0, -4, 4.0, "4", None, True),
    "top_groups": (0, -2, 5, 2.0, "2", None, True),
    "scoring": ("tanh", "", None, 1, True),
    "group_score": ("mean", "", None, 2, True),
    "normalise": (0, 1, "yes", None),
    "scale": (0, -2.5, math.nan, math.inf, "1", None, True),
}


def probabilities(row, scoring):
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-a)) for a in row]
    powers = [math.exp(a - max(row)) for a in row]
    return [power / sum(powers) for power in powers]


def ranked(scores):
    """Indices, the best score first, the lower index first where they are equal."""
    return [i for _, i in sorted((-score, i) for i, score in enumerate(scores))]


def oracle(op, logits, bias):
    """Weights, experts, and how near any decision came to a tie."""
    weights, experts = np.zeros((len(logits), op.top_k)), np.zeros((len(logits), op.top_k), dtype=int)
    margin, size, summed = math.inf, len(bias) // op.groups, {"top2": 2, "max": 1}[op.group_score]
    for t, row in enumerate(logits):
        p = probabilities(row, op.scoring)
        s = [a + b for a, b in zip(p, bias, strict=True)]
        g = [sum(sorted(s[i * size : (i + 1) * size])[-summed:]) for i in range(op.groups)]
        order = ranked(g)
        stay, dropped = order[: op.top_groups], order[op.top_groups :]
        s = [a if x // size in stay else -math.inf for x, a in enumerate(s)]
        order = ranked(s)
        experts[t] = order[: op.top_k]
        weights[t] = [p[x] for x in experts[t]]
        if op.normalise:
            weights[t] /= weights[t].sum() + 1e-20
        weights[t] *= op.scale
        margin = min([margin, *(s[x] - s[y] for x, y in itertools.pairwise(order[: op.top_k + 1]))])
        margin = min([margin, *(g[stay[-1]] - g[i] for i in dropped)])
    return weights, experts, margin


def verify(rules, op, logits, bias, layout=torch.clone):
    """The oracle for what has no near ties."""
    weights, experts = rules(op, layout(logits), layout(bias))
    want, chosen, margin = oracle(op, exact(logits), exact(bias))
    assert margin > 2e-6
    np.testing.assert_array_equal(experts.numpy(), chosen)
    rules.close(weights, want)


def wide(rules, values):
    return rules.tensor(values, rules.wide)


#: Experts, groups, groups that stay, experts a token.
CASES = [(8, 1, 1, 3), (8, 4, 2, 3), (12, 3, 1, 4), (12, 6, 6, 5), (20, 5, 3, 12), (256, 8, 4, 8), (4, 2, 1, 1)]


@each(("count", "groups", "top_groups", "top_k"), CASES)
@each("scoring", ["sigmoid", "softmax"])
@each("group_score", ["top2", "max"])
@each("layout", [torch.clone, strided])
def test_choice_and_weights(rules, rng, count, groups, top_groups, top_k, scoring, group_score, layout):
    op = ops.GatingTopK(
        top_k=top_k, groups=groups, top_groups=top_groups, scoring=scoring, group_score=group_score, scale=2.5
    )
    # Every token has the logits of one grid in an order of its own: no two of them are near each other.
    grid = (np.arange(count) - count / 2) * 6 / count
    logits = wide(rules, [rng.permutation(grid) + 0.01 * rng.random(count) / count for _ in range(5)])
    verify(rules, op, logits, rules.random(rng, count, dtype=rules.wide) * 0.3, layout)


@each("tokens", [0, 1, 2])
@each("scoring", ["sigmoid", "softmax"])
def test_few_tokens(rules, rng, tokens, scoring):
    op = ops.GatingTopK(top_k=3, groups=4, top_groups=2, scoring=scoring)
    verify(rules, op, rules.random(rng, tokens, 16, dtype=rules.wide), rules.random(rng, 16, dtype=rules.wide))


@each("normalise", [True, False])
@each("scale", [1.0, 2.5])
@each("scoring", ["sigmoid", "softmax"])
def test_normalise_and_scale(rules, rng, normalise, scale, scoring):
    op = ops.GatingTopK(top_k=4, scoring=scoring, normalise=normalise, scale=scale)
    logits = rules.random(rng, 3, 12, dtype=rules.wide)
    verify(rules, op, logits, wide(rules, np.zeros(12)))
    sums = rules(op, logits, wide(rules, np.zeros(12)))[0].sum(1)
    assert normalise == all(sums.sub(scale).abs() < 1e-5)


def test_a_small_number_keeps_the_sum_from_zero(rules):
    """Of scores that are 0 in any precision the weights are 0, not NaN."""
    logits = wide(rules, [[-1e4, -1e4, -1e4, -1e4], [0.0, -1e4, -1e4, -1e4]])
    weights, experts = rules(ops.GatingTopK(top_k=2), logits, wide(rules, np.zeros(4)))
    rules.close(weights, [[0, 0], [1, 0]])
    assert experts.tolist() == [[0, 1], [0, 1]]


@each("scoring", ["sigmoid", "softmax"])
def test_logits_of_any_size(rules, scoring):
    logits = wide(rules, [[1e4, -1e4, 0.0, 9e3]])
    weights, experts = rules(
        ops.GatingTopK(top_k=2, scoring=scoring, normalise=False), logits, wide(rules, [0.0, 0.0, 0.25, 0.5])
    )
    # The third has 0.5 + 0.25 of a sigmoid and 0.25 of a softmax; the fourth 1.5 and 0.5.
    want = {"sigmoid": ([[1, 1]], [[3, 0]]), "softmax": ([[1, 0]], [[0, 3]])}[scoring]
    rules.close(weights, want[0])
    assert experts.tolist() == want[1]


def test_bias_selects_and_does_not_weigh(rules):
    """The bias lifts the last expert over the first; its weight is that of its own logit."""
    logits = wide(rules, [[2.0, 1.0, 0.0, -1.0]])
    p = probabilities([2.0, 1.0, 0.0, -1.0], "sigmoid")
    for bias, chosen in (([0, 0, 0, 0], [0, 1]), ([0, 0, 0, 1], [3, 0]), ([-3, 0, 0, 5], [3, 1])):
        op = ops.GatingTopK(top_k=2, normalise=False)
        weights, experts = rules(op, logits, wide(rules, np.array(bias, dtype=float)))
        assert experts.tolist() == [chosen]
        rules.close(weights, [[p[x] for x in chosen]])


@each("scoring", ["sigmoid", "softmax"])
@each("group_score", ["top2", "max"])
def test_negative_scores_win_over_dropped_groups(rules, scoring, group_score):
    """All biased scores are negative: were dropped groups at 0, not at -inf, their experts would be chosen."""
    logits = wide(rules, [[0.5, 0.2, -0.5, -0.2, 3.0, -3.0, 2.0, 1.5]])
    bias = wide(rules, [-5.0, -5.0, -5.5, -5.25, -7.0, -7.0, -9.0, -9.0])
    op = ops.GatingTopK(top_k=4, groups=4, top_groups=2, scoring=scoring, group_score=group_score)
    verify(rules, op, logits, bias)
    assert sorted(rules(op, logits, bias)[1][0].tolist()) == [0, 1, 2, 3]


def test_dropped_groups_are_dropped(rules):
    """The best expert of all is not chosen where its group is dropped: two good ones beat it."""
    logits = wide(rules, [[3.0, -3.0, 1.0, 1.2, 0.0, 0.1]])
    bias = wide(rules, np.zeros(6))
    for score, chosen in (("top2", [3, 2]), ("max", [0, 1])):
        op = ops.GatingTopK(top_k=2, groups=3, top_groups=1, group_score=score)
        verify(rules, op, logits, bias)
        assert rules(op, logits, bias)[1].tolist() == [chosen]


@each("count", [4, 12, 20, 37, 64, 160, 256])
@each("tokens", [1, 3, 50])
@each("scoring", ["sigmoid", "softmax"])
def test_of_equal_experts_the_lower_comes_first(rules, rng, count, tokens, scoring):
    """Whatever the logit, its score is the same in every place of a row and of the batch, to the last bit."""
    op, bias = ops.GatingTopK(top_k=count, scoring=scoring), wide(rules, np.zeros(count))
    for _ in range(4):
        logits = np.repeat(rng.standard_normal(-(-tokens // 3)), 3)[:tokens]  # each in up to three rows
        weights, experts = rules(op, wide(rules, np.tile(logits[:, None], count)), bias)
        assert experts.tolist() == [list(range(count))] * tokens
        rules.close(weights, np.full((tokens, count), 1 / count))
        assert torch.equal(weights, weights[::3, :1].repeat_interleave(3, 0)[:tokens].expand(tokens, count))


@each("scoring", ["sigmoid", "softmax"])
def test_equal_experts_behind_a_better_one(rules, scoring):
    logits = wide(rules, [[0.5, 1.5, 0.5, 1.5, 0.5, 2.5, 0.5, 1.5]])
    _, experts = rules(ops.GatingTopK(top_k=6, scoring=scoring), logits, wide(rules, np.zeros(8)))
    assert experts.tolist() == [[5, 1, 3, 7, 0, 2]]


@each("groups", [2, 4, 8, 40])
@each("group_score", ["top2", "max"])
@each("scoring", ["sigmoid", "softmax"])
def test_of_equal_groups_the_lower_stays(rules, rng, groups, group_score, scoring):
    row = rng.standard_normal(3)
    logits = wide(rules, np.stack([np.tile(row, groups), np.tile(row[::-1], groups)]))
    bias = wide(rules, np.zeros(3 * groups))
    for top_groups in {1, 2, groups // 2, groups}:
        op = ops.GatingTopK(
            top_k=3 * top_groups, groups=groups, top_groups=top_groups, group_score=group_score, scoring=scoring
        )
        _, experts = rules(op, logits, bias)
        assert [sorted(chosen) for chosen in experts.tolist()] == [list(range(3 * top_groups))] * 2


def test_equal_groups_behind_a_better_one(rules):
    logits = wide(rules, [[0.0, 0.5, 0.0, 0.5, 1.0, 0.5, 0.5, 0.0]])
    op = ops.GatingTopK(top_k=4, groups=4, top_groups=2)
    _, experts = rules(op, logits, wide(rules, np.zeros(8)))
    assert experts.tolist() == [[4, 1, 5, 0]]


def test_operands_stay_as_they_were(rules, rng):
    logits, bias = rules.random(rng, 3, 8, dtype=rules.wide), rules.random(rng, 8, dtype=rules.wide)
    before = logits.clone(), bias.clone()
    rules(ops.GatingTopK(top_k=3, groups=4, top_groups=2, scale=3.0), logits, bias)
    assert torch.equal(logits, before[0]) and torch.equal(bias, before[1])


LOGITS, BIAS = Aval((3, 12), "fp32"), Aval((12,), "fp32")


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_shapes(dtype):
    op = ops.GatingTopK(top_k=6, groups=4, top_groups=2)
    assert op.infer(LOGITS.with_float(dtype), BIAS.with_float(dtype)) == (Aval((3, 6), dtype), Aval((3, 6), "int32"))
    single = ops.GatingTopK(top_k=1, groups=12, top_groups=1, group_score="max")
    assert single.infer(LOGITS, BIAS) == (Aval((3, 1), "fp32"), Aval((3, 1), "int32"))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"groups": 5}, r"groups must divide axis X, 12: got 5"),
        ({"groups": 12}, r"a group must have two experts for the sum of its two best: got 1"),
        ({"groups": 4, "top_groups": 2, "top_k": 7}, r"top_k must be in 1\.\.6, 2 groups of 3: got 7"),
        ({"top_k": 13}, r"top_k must be in 1\.\.12, 1 groups of 12: got 13"),
    ],
)
def test_parameters_that_are_refused(parameters, message):
    with pytest.raises(ShapeError, match="gating_top_k: " + message):
        ops.GatingTopK(**({"top_k": 2} | parameters)).infer(LOGITS, BIAS)


def test_shapes_that_are_refused():
    op = ops.GatingTopK(top_k=2)
    with pytest.raises(ShapeError, match=r"gating_top_k: axis X .* 12 in logits, 8 in bias"):
        op.infer(LOGITS, Aval((8,), "fp32"))
    with pytest.raises(ShapeError, match=r"gating_top_k: bias must be fp32, to go with logits, fp32: got bf16"):
        op.infer(LOGITS, Aval((12,), "bf16"))
    with pytest.raises(ShapeError, match=r"gating_top_k: logits must be floating \(fp32, fp64\): got bf16"):
        op.infer(LOGITS.with_float("bf16"), BIAS.with_float("bf16"))
    with pytest.raises(ShapeError, match=r"gating_top_k: logits must be \[T, X\], 2 axes: got fp32\[12\], 1 axes"):
        op.infer(BIAS, BIAS)
