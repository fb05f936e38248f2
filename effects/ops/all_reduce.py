"""Sum over the ranks of the group.

    out = sum_r x of rank r

Closes the row-parallel output projection: each rank holds the columns of its
own heads.  Summed in rank order, so that all ranks get the same bits.
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import FLOATS, Aval, match, require_dtype
from mla_fx.effects.op import Op


@frozen
class AllReduce(Op):
    """`x` [T, D] -> [T, D]."""

    operands: ClassVar = ("x",)
    communicates: ClassVar = "dcp"

    def shape_rule(self, x: Aval) -> tuple[Aval, ...]:
        """Any floating dtype."""
        match(self.name, x=(x, "T D"))
        require_dtype(self.name, "x", x, *FLOATS)
        return (x,)
