"""Put the ranks' features side by side.

    out[t, r * F + f] = x of rank r [t, f]          the first `features` of them

Closes a column-parallel projection, as that of the head, whose last rank's
features are padded where the ranks do not divide them.
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import FLOATS, Aval, ShapeError, match, require_dtype
from mla_fx.effects.op import Op


@frozen
class AllGather(Op):
    """`x` [T, F] -> [T, `features`], with F = ceil(features / ranks)."""

    features: int
    ranks: int
    operands: ClassVar = ("x",)
    communicates: ClassVar = "dcp"

    def shape_rule(self, x: Aval) -> tuple[Aval, ...]:
        """The ranks' features together must be those asked for."""
        axes = match(self.name, x=(x, "T F"))
        require_dtype(self.name, "x", x, *FLOATS)
        if axes["F"] != -(-self.features // self.ranks):
            raise ShapeError(
                f"{self.name}: axis F of x must be {-(-self.features // self.ranks)}, {self.features} features over "
                f"{self.ranks} ranks: got {axes['F']}"
            )
        return (Aval((axes["T"], self.features), x.dtype),)
