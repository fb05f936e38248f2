"""`ops.DispatchTokens`: each token of a rank's share once to every rank that has an expert of it."""

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, Group, InputError, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import strided
from tests.ops.test_permute_tokens import draw

SENSE = {"own": 3, "among": Group("tp", 1)}
NONSENSE = {"own": (0, -7, 3.0, "3", None, True), "among": (1, "tp", None, Group("tp", 3))}

#: Replicas, ranks of each, tokens, experts a token, experts on a rank.
CASES = [
    (2, 1, 3, 2, 2),
    (2, 2, 5, 3, 1),
    (3, 2, 1, 2, 4),
    (4, 1, 6, 1, 2),
    (2, 4, 3, 2, 1),
    (2, 2, 0, 2, 2),
    (1, 2, 4, 2, 3),
]


def sent_to(experts: list[torch.Tensor], target: int, own: int, tp: int) -> list[tuple[int, int]]:
    """Of each rank after the other, the tokens of its share that `target` has an expert of: rank and token."""
    found = []
    for source, of_replica in enumerate(experts):
        share = -(-len(of_replica) // tp)
        first = source % tp * share
        for t in range(first, min(first + share, len(of_replica))):
            if target in [expert // own for expert in of_replica[t].tolist()]:
                found.append((source, t))
    return found


def given(rules, rng, dp, tp, tokens, top_k, own):
    """For each rank the tokens of its replica, weights and chosen experts."""
    count = dp * tp * own
    replicas = [
        (
            rules.random(rng, tokens, 5),
            rules.random(rng, tokens, top_k, dtype=rules.wide),
            draw(rng, tokens, min(top_k, count), count),
        )
        for _ in range(dp)
    ]
    return [replicas[rank // tp] for rank in range(dp * tp)]


def verify(rules, operands, own, tp, layout=torch.clone):
    """On every rank; returns how many rows each has been brought."""
    ranks = len(operands)
    op = ops.DispatchTokens(own, Group("ep", ranks), Group("tp", tp))
    brought = []
    found = rules.group(op, [tuple(map(layout, of_rank)) for of_rank in operands])
    for rank, (rows, weights, experts, counts) in enumerate(found):
        wanted = sent_to([of_rank[2] for of_rank in operands], rank, own, tp)
        assert counts.tolist() == [sum(source == s for s, _ in wanted) for source in range(ranks)]
        for j, (source, t) in enumerate(wanted):
            for got, sent in zip((rows, weights, experts), operands[source], strict=True):
                assert torch.equal(got[j], sent[t])
        behind = slice(len(wanted), None)
        assert (weights[behind] == 0).all()
        assert not ((experts[behind] // own) == rank).any() or ranks == 1
        assert ((experts[behind] >= 0) & (experts[behind] < ranks * own)).all()
        brought.append(len(wanted))
    return brought


@each(("dp", "tp", "tokens", "top_k", "own"), CASES)
@each("layout", [torch.clone, strided])
def test_tokens_go_where_their_experts_are(rules, rng, dp, tp, tokens, top_k, own, layout):
    operands = given(rules, rng, dp, tp, tokens, top_k, own)
    brought = verify(rules, operands, own, tp, layout)
    assert sum(brought) <= dp * tokens * top_k


def test_a_token_goes_to_a_rank_once(rules, rng):
    """All experts of all tokens on one rank: it gets each token once, and the others nothing."""
    x, weights = rules.random(rng, 4, 3), rules.random(rng, 4, 3, dtype=rules.wide)
    experts = torch.tensor([[6, 8, 7]] * 4, dtype=torch.int32)
    assert verify(rules, [(x, weights, experts)] * 4, 3, 2) == [0, 0, 8, 0]


def test_ranks_without_tokens(rules, rng):
    """One token for four ranks of a replica: three have no share, and take part."""
    operands = given(rules, rng, 2, 4, 1, 2, 2)
    assert sum(verify(rules, operands, 2, 4)) >= 2


def test_bits_arrive_as_they_were(rules):
    """NaN and infinities too."""
    x = rules.tensor([[np.nan, np.inf], [-np.inf, -0.0]])
    weights = torch.tensor([[np.nan], [-0.0]], dtype=rules.wide)
    operands = [(x, weights, torch.tensor([[1], [1]], dtype=torch.int32))] * 2
    op = ops.DispatchTokens(1, Group("ep", 2), Group("tp", 2))
    _, (rows, row_weights, _, counts) = rules.group(op, operands)
    assert counts.tolist() == [1, 1]
    assert torch.equal(rows.isnan(), x.isnan()) and torch.equal(row_weights.isnan(), weights.isnan())
    assert torch.equal(rows.signbit()[1], x.signbit()[1])


AVALS = {"x": Aval((5, 8), "bf16"), "weights": Aval((5, 4), "fp32"), "experts": Aval((5, 4), "int32")}
OP = ops.DispatchTokens(2, Group("ep", 8), Group("tp", 4))


def test_shapes():
    assert OP.infer(*AVALS.values()) == (
        Aval((16, 8), "bf16"),
        Aval((16, 4), "fp32"),
        Aval((16, 4), "int32"),
        Aval((8,), "int64"),
    )
    assert OP.waits and OP.communicates == "all_to_all_v"


def test_bytes_at_most():
    """Two tokens a rank to four others, 8 features of 2 bytes, 4 weights and 4 experts of 4."""
    assert OP.handed(*AVALS.values()) == 2 * 4 * (16 + 16 + 16)


@pytest.mark.parametrize(
    ("operand", "aval", "message"),
    [
        ("weights", Aval((5, 4), "bf16"), r"weights must be fp32"),
        ("weights", Aval((5, 3), "fp32"), r"axis U .* 3 in weights, 4 in experts"),
        ("experts", Aval((5, 4), "int64"), r"experts must be int32: got int64"),
        ("x", Aval((4, 8), "bf16"), r"axis T .* 4 in x, 5 in weights"),
    ],
)
def test_shapes_that_are_refused(operand, aval, message):
    with pytest.raises(ShapeError, match="dispatch_tokens: " + message):
        OP.infer(*(AVALS | {operand: aval}).values())


def test_replicas_must_fill_the_group():
    for op in (ops.DispatchTokens, ops.CombineTokens):
        with pytest.raises(InputError, match=r"^among: must be of a size that divides ep\[8\]: got tp\[3\]$"):
            op(2, Group("ep", 8), Group("tp", 3))
