"""Join the tokens of two micro-batches, those of the first before those of the rest.

    out[t] = first[t]  for t < T        out[T + j] = rest[j]

The inverse of `split_tokens`.
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.op import Op


@frozen
class JoinTokens(Op):
    """`first` [T, D], `rest` [J, D] -> [T + J, D]."""

    operands: ClassVar = {"first": "T D", "rest": "J D"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Features must agree."""
        return (Aval((axes["T"] + axes["J"], axes["D"]), dtype),)
