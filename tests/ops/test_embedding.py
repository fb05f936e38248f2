"""`ops.Embedding`: rows of the vocabulary, each rank giving those it holds."""

import math

import numpy as np
import pytest
import torch

from mla_fx.effects import Aval, Group, InputError, ShapeError, ops
from tests.cases import each
from tests.ops.conftest import exact, strided

SENSE = {"vocabulary": 7}
NONSENSE = {"vocabulary": (0, -7, 7.0, "7", None, True)}


def shares(rules, whole, ranks):
    """The ranks' tables, the rows behind the vocabulary poisoned."""
    own = -(-len(whole) // ranks)
    padded = rules.tensor(np.full((own * ranks, whole.shape[1]), math.nan))
    padded[: len(whole)] = whole
    return list(padded.chunk(ranks))


def oracle(tokens, whole, rank, ranks):
    own, out = math.ceil(len(whole) / ranks), np.zeros((len(tokens), whole.shape[1]))
    for t, token in enumerate(tokens):
        if token != -1 and token // own == rank:
            out[t] = whole[token]
    return out


@each(("vocabulary", "ranks"), [(7, 1), (8, 2), (7, 2), (7, 3), (5, 4), (6, 6), (2, 3)])
@each("layout", [torch.clone, strided])
def test_every_rank_gives_its_rows(rules, rng, vocabulary, ranks, layout):
    """Of (5, 4) and (2, 3) the last rank has padding only."""
    whole = rules.random(rng, vocabulary, 3)
    tokens = torch.tensor([-1, *rng.permutation(vocabulary), 0, vocabulary - 1, -1])
    total = np.zeros((len(tokens), 3))
    for rank, table in enumerate(shares(rules, whole, ranks)):
        (got,) = rules(ops.Embedding(vocabulary, Group("tp", ranks)), layout(tokens), layout(table), rank=rank)
        np.testing.assert_array_equal(exact(got), oracle(tokens.tolist(), exact(whole), rank, ranks))
        total += exact(got)
    want = [exact(whole)[token] if token >= 0 else np.zeros(3) for token in tokens.tolist()]
    np.testing.assert_array_equal(total, want)


@each("tokens", [[], [4], [-1], [0], [3, 3, 3]])
@each("rank", [0, 1])
def test_few_tokens(rules, rng, tokens, rank):
    whole = rules.random(rng, 5, 4)
    given = torch.tensor(tokens, dtype=torch.int64)
    (got,) = rules(ops.Embedding(5, Group("tp", 2)), given, shares(rules, whole, 2)[rank], rank=rank)
    np.testing.assert_array_equal(exact(got), oracle(tokens, exact(whole), rank, 2))


def test_poison_reaches_the_tokens_that_ask_for_it_only(rules):
    """A rank looks up something for every token: what it is not to give is selected away, not multiplied by 0."""
    table = rules.tensor([[math.nan, math.inf], [1.0, 2.0]])
    (got,) = rules(ops.Embedding(4, Group("tp", 2)), torch.tensor([-1, 3, 1, 2, 0]), table, rank=1)
    rules.close(got, [[0, 0], [1, 2], [0, 0], [math.nan, math.inf], [0, 0]])


def test_padding_behind_the_vocabulary_is_no_token(rules, rng):
    """Not even where a token that no value rule has seen asks for it."""
    whole = rules.random(rng, 5, 3)
    (got,) = rules(ops.Embedding(5, Group("tp", 2)), torch.tensor([5, 4, 6]), shares(rules, whole, 2)[1], rank=1)
    np.testing.assert_array_equal(exact(got), [np.zeros(3), exact(whole)[4], np.zeros(3)])


def test_operands_stay_as_they_were(rules, rng):
    tokens, table = torch.tensor([2, -1, 0, 3]), rules.random(rng, 2, 3)
    before = tokens.clone(), table.clone()
    for rank in range(2):
        rules(ops.Embedding(4, Group("tp", 2)), tokens, table, rank=rank)
    assert torch.equal(tokens, before[0]) and torch.equal(table, before[1])


AVALS = {"tokens": Aval((3,), "int64"), "table": Aval((4, 8), "bf16")}


@pytest.mark.parametrize(("vocabulary", "ranks"), [(4, 1), (8, 2), (7, 2), (10, 3), (13, 4)])
def test_shapes(vocabulary, ranks):
    assert ops.Embedding(vocabulary, Group("tp", ranks)).infer(*AVALS.values()) == (Aval((3, 8), "bf16"),)


@pytest.mark.parametrize(
    ("operand", "aval", "message"),
    [
        ("table", Aval((3, 8), "bf16"), r"axis A of table must be 4, a vocabulary of 7 over tp\[2\]: got 3"),
        ("table", Aval((7, 8), "bf16"), r"axis A of table must be 4, a vocabulary of 7 over tp\[2\]: got 7"),
        ("table", Aval((4, 8), "int8"), r"table must be floating \(bf16, fp16, fp32, fp64\): got int8"),
        ("table", Aval((4,), "bf16"), r"table must be \[A, D\], 2 axes: got bf16\[4\], 1 axes"),
        ("tokens", Aval((3,), "int32"), r"tokens must be int64: got int32"),
        ("tokens", Aval((3, 1), "int64"), r"tokens must be \[T\], 1 axes: got int64\[3, 1\], 2 axes"),
    ],
)
def test_shapes_that_are_refused(operand, aval, message):
    with pytest.raises(ShapeError, match="embedding: " + message):
        ops.Embedding(7, Group("tp", 2)).infer(*(AVALS | {operand: aval}).values())


@pytest.mark.parametrize("tokens", [[], [-1, -1], [0, 6], [3, 3, 3]])
def test_values_that_are_accepted(tokens):
    ops.Embedding(7, Group("tp", 2)).value_rule(AVALS, {"tokens": np.array(tokens, dtype=np.int64)})


@pytest.mark.parametrize(
    ("tokens", "wrong"), [([0, 7, 8], 7), ([7], 7), ([-2], -2), ([6, -1, -3], -3), ([1, 2**40], 2**40)]
)
def test_values_that_are_refused(tokens, wrong):
    """A row of the last rank's padding is no token of the vocabulary."""
    with pytest.raises(InputError, match=rf"^tokens: each must be -1 or in 0\.\.6: got {wrong}$"):
        ops.Embedding(7, Group("tp", 2)).value_rule(AVALS, {"tokens": np.array(tokens)})
