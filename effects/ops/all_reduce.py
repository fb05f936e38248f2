"""Sum over the ranks of the group.

    out = sum_r x of rank r

Closes the row-parallel output projection: each rank holds the columns of its
own heads.  Summed in rank order, so that all ranks get the same bits.
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.group import Group
from mla_fx.effects.op import Op
from mla_fx.effects.validate import instance


@frozen
class AllReduce(Op):
    """`x` [T, D] -> [T, D], summed over `group`."""

    group: Group = field(validator=instance(Group))
    operands: ClassVar = {"x": "T D"}
    communicates: ClassVar = "all_reduce"
    alike: ClassVar = True

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Any floating dtype."""
        return (Aval((axes["T"], axes["D"]), dtype),)
