"""`ops.CombineTokens`: what ranks have made of a token comes back to the rank of its share, and is added up."""

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, Group, ShapeError, ops
from tests.cases import each
from tests.ops import test_dispatch_tokens as dispatched
from tests.ops.conftest import exact, on_cpu, strided
from tests.ops.test_dispatch_tokens import CASES, sent_to
from tests.ops.test_permute_tokens import draw

SENSE, NONSENSE = dispatched.SENSE, dispatched.NONSENSE


def brought(rules, rng, dp, tp, tokens, top_k, own):
    """For each rank: rows made of what it was sent, garbage behind; the experts of its replica; counts."""
    ranks = dp * tp
    replicas = [draw(rng, tokens, min(top_k, ranks * own), ranks * own) for _ in range(dp)]
    experts = [replicas[rank // tp] for rank in range(ranks)]
    room, operands = ranks * -(-tokens // tp), []
    for rank in range(ranks):
        wanted = sent_to(experts, rank, own, tp)
        rows = rules.random(rng, room, 5)
        rows[len(wanted) :] = np.nan
        counts = torch.tensor([sum(source == s for s, _ in wanted) for source in range(ranks)])
        operands.append((rows, experts[rank], counts))
    return operands


@each(("dp", "tp", "tokens", "top_k", "own"), CASES)
@each("layout", [torch.clone, strided])
def test_sums_of_what_comes_back(rules, rng, dp, tp, tokens, top_k, own, layout):
    operands = brought(rules, rng, dp, tp, tokens, top_k, own)
    experts = [of_rank[1] for of_rank in operands]
    want = np.zeros((dp * tp, tokens, 5))
    for rank, (rows, _, _) in enumerate(operands):
        for j, (source, t) in enumerate(sent_to(experts, rank, own, tp)):
            want[source, t] += exact(rows)[j]
    op = ops.CombineTokens(own, Group("ep", dp * tp), Group("tp", tp))
    results = rules.group(op, [tuple(map(layout, of_rank)) for of_rank in operands])
    for rank, (out,) in enumerate(results):
        rules.close(out, want[rank])
        share = -(-tokens // tp)
        first = rank % tp * share
        others = [t for t in range(tokens) if not first <= t < first + share]
        assert torch.equal(out[others], torch.zeros_like(out[others]))


def test_in_rank_order_and_rounded_once():
    """1e8 and -1e8 cancel before 1 is added, in float32; in another order it would be lost."""
    rows = [torch.tensor([[x]], dtype=torch.float32) for x in (1e8, -1e8, 1.0)]
    experts, counts = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([1, 0, 0])
    op = ops.CombineTokens(1, Group("ep", 3), Group("tp", 3))
    operands = [(torch.cat([one, torch.full((2, 1), torch.nan)]), experts, counts) for one in rows]
    (first,), *others = on_cpu(torch.float32).group(op, operands)
    assert first.item() == 1.0 and all(out.item() == 0 for (out,) in others)


AVALS = {"rows": Aval((16, 8), "bf16"), "experts": Aval((5, 4), "int32"), "counts": Aval((8,), "int64")}
OP = ops.CombineTokens(2, Group("ep", 8), Group("tp", 4))


def test_shapes():
    assert OP.infer(*AVALS.values()) == (Aval((5, 8), "bf16"),)
    assert OP.waits and OP.communicates == "all_to_all_v"


def test_bytes_at_most():
    """As many rows as are dispatched at most: two tokens a rank from four others, 8 features of 2 bytes."""
    assert OP.handed(*AVALS.values()) == 2 * 4 * 16


@pytest.mark.parametrize(
    ("operand", "aval", "message"),
    [
        (
            "rows",
            Aval((15, 8), "bf16"),
            r"axes J of rows and W of counts must be 16 and 8, for 5 tokens .* got 15 and 8",
        ),
        ("counts", Aval((4,), "int64"), r"axes J of rows and W of counts must be 16 and 8, .* got 16 and 4"),
        ("experts", Aval((5, 4), "int64"), r"experts must be int32: got int64"),
    ],
)
def test_shapes_that_are_refused(operand, aval, message):
    with pytest.raises(ShapeError, match="combine_tokens: " + message):
        OP.infer(*(AVALS | {operand: aval}).values())
