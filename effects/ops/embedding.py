"""Rows of the vocabulary, each rank giving those it holds.

    out[t] = table[tokens[t] - rank * A]     where this rank holds the token
    out[t] = 0                               elsewhere, and where tokens[t] = -1

A rank holds A = ceil(vocabulary / ranks) rows, the last rank's padded with any
rows behind the vocabulary.  An all-reduce closes it, and is exact: one rank
gives the row, the others give zeros.  Source: vocabulary-parallel embedding,
as in Megatron-LM (arXiv 1909.08053) and vLLM.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from mla_fx.effects.aval import FLOATS, Aval, ShapeError, match, require_dtype
from mla_fx.effects.op import InputError, Op


@frozen
class Embedding(Op):
    """`tokens` int64 [T] in -1..vocabulary-1, `table` [A, D] -> [T, D]."""

    vocabulary: int
    ranks: int
    operands: ClassVar = ("tokens", "table")
    needs_rank: ClassVar = True

    def shape_rule(self, tokens: Aval, table: Aval) -> tuple[Aval, ...]:
        """The ranks' rows together must be the vocabulary."""
        axes = match(self.name, tokens=(tokens, "T"), table=(table, "A D"))
        require_dtype(self.name, "tokens", tokens, "int64")
        require_dtype(self.name, "table", table, *FLOATS)
        if axes["A"] != -(-self.vocabulary // self.ranks):
            raise ShapeError(
                f"{self.name}: axis A of table must be {-(-self.vocabulary // self.ranks)}, a vocabulary of "
                f"{self.vocabulary} over {self.ranks} ranks: got {axes['A']}"
            )
        return (Aval((axes["T"], axes["D"]), table.dtype),)

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Every token is one of the vocabulary, or -1 for none."""
        tokens = values["tokens"]
        if tokens.size and not -1 <= tokens.min() <= tokens.max() < self.vocabulary:
            wrong = next(token for token in tokens.tolist() if not -1 <= token < self.vocabulary)
            raise InputError(f"tokens: each must be -1 or in 0..{self.vocabulary - 1}: got {wrong}")
