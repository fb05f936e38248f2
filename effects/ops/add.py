"""The residual: out = x + y."""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, match, same_dtype
from mla_fx.effects.op import Op


@frozen
class Add(Op):
    """`x` [T, D], `y` [T, D] -> [T, D]."""

    operands: ClassVar = ("x", "y")

    def shape_rule(self, x: Aval, y: Aval) -> tuple[Aval, ...]:
        """No broadcasting, one dtype."""
        match(self.name, x=(x, "T D"), y=(y, "T D"))
        same_dtype(self.name, x=x, y=y)
        return (x,)
