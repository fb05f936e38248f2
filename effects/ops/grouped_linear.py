"""Project the rows of every expert with that expert's weight.

    out[g, f] = sum_d rows[g, d] * weight[y, f, d]        for the counts[y] rows g of expert y

Rows lie expert after expert; those behind the last count are not read and
their results hold anything.  Source: grouped matrix product of a mixture of
experts; the weights are the checkpoint's `experts.*.*_proj.weight`, stacked.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.op import Op


@frozen
class GroupedLinear(Op):
    """`rows` [Z, D], `weight` [Y, F, D], `counts` int64 [Y] -> [Z, F]."""

    operands: ClassVar = {"rows": "Z D", "weight": "Y F D", "counts": "Y int64"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """A count for every expert."""
        return (Aval((axes["Z"], axes["F"]), dtype),)

    def work(self, axes: Mapping[str, int], lengths: Mapping[str, Sequence[int]]) -> int:
        """Where all rows are of the experts here, which is the most."""
        return axes["Z"] * axes["D"] * axes["F"]
