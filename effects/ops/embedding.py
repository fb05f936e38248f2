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

from attrs import field, frozen

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.group import Group
from mla_fx.effects.op import Op
from mla_fx.effects.validate import InputError, instance, integer, within


@frozen
class Embedding(Op):
    """`tokens` int64 [T] in -1..vocabulary-1, `table` [A, D] of this rank of `group` -> [T, D]."""

    vocabulary: int = field(validator=integer(1))
    group: Group = field(validator=instance(Group))
    operands: ClassVar = {"tokens": "T int64", "table": "A D"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """The ranks' rows together must be the vocabulary."""
        if axes["A"] != self.group.share(self.vocabulary):
            raise ShapeError(
                f"{self.name}: axis A of table must be {self.group.share(self.vocabulary)}, a vocabulary of "
                f"{self.vocabulary} over {self.group}: got {axes['A']}"
            )
        return (Aval((axes["T"], axes["D"]), dtype),)

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Every token is one of the vocabulary, or -1 for none."""
        tokens = values["tokens"]
        if not within(tokens, -1, self.vocabulary):
            wrong = next(token for token in tokens.tolist() if not -1 <= token < self.vocabulary)
            raise InputError(f"tokens: each must be -1 or in 0..{self.vocabulary - 1}: got {wrong}")
