"""The residual: out = x + y."""

from collections.abc import Mapping
from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.op import Op


@frozen
class Add(Op):
    """`x` [T, D], `y` [T, D] -> [T, D]."""

    operands: ClassVar = {"x": "T D", "y": "T D"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """No broadcasting, one dtype."""
        return (Aval((axes["T"], axes["D"]), dtype),)
