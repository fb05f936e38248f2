"""Put the ranks' features side by side.

    out[t, r * F + f] = x of rank r [t, f]          the first `features` of them

Closes a column-parallel projection, as that of the head, whose last rank's
features are padded where the ranks do not divide them.
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.group import Group
from mla_fx.effects.op import Op
from mla_fx.effects.validate import instance, integer


@frozen
class AllGather(Op):
    """`x` [T, F] -> [T, `features`], with F = ceil(features / W) and W the size of `group`."""

    features: int = field(validator=integer(0))
    group: Group = field(validator=instance(Group))
    operands: ClassVar = {"x": "T F"}
    communicates: ClassVar = "all_gather"
    alike: ClassVar = True

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """The ranks' features together must be those asked for."""
        if axes["F"] != self.group.share(self.features):
            raise ShapeError(
                f"{self.name}: axis F of x must be {self.group.share(self.features)}, {self.features} features over "
                f"{self.group}: got {axes['F']}"
            )
        return (Aval((axes["T"], self.features), dtype),)
