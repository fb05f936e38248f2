"""Project the rows of every expert with that expert's weight.

    out[g, f] = sum_d rows[g, d] * weight[y, f, d]        for the counts[y] rows g of expert y

Rows lie expert after expert; those behind the last count are not read and
their results hold anything.  Source: grouped matrix product of a mixture of
experts; the weights are the checkpoint's `experts.*.*_proj.weight`, stacked.
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, match, require_dtype, same_dtype
from mla_fx.effects.op import Op


@frozen
class GroupedLinear(Op):
    """`rows` [Z, D], `weight` [Y, F, D], `counts` int64 [Y] -> [Z, F]."""

    operands: ClassVar = ("rows", "weight", "counts")

    def shape_rule(self, rows: Aval, weight: Aval, counts: Aval) -> tuple[Aval, ...]:
        """A count for every expert."""
        axes = match(self.name, rows=(rows, "Z D"), weight=(weight, "Y F D"), counts=(counts, "Y"))
        dtype = same_dtype(self.name, rows=rows, weight=weight)
        require_dtype(self.name, "counts", counts, "int64")
        return (Aval((axes["Z"], axes["F"]), dtype),)
