"""Split the tokens of a step into two micro-batches.

    first[t] = x[t]        rest[t] = x[count + t]

Source: micro-batches that hide communication behind each other's computation
(DeepSeek-V3, arXiv 2412.19437, section 3.4.2).
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.op import Op
from mla_fx.effects.validate import integer


@frozen
class SplitTokens(Op):
    """`x` [T, D] -> `first` [count, D], `rest` [T - count, D]."""

    count: int = field(validator=integer(0))
    operands: ClassVar = {"x": "T D"}
    results: ClassVar = ("first", "rest")

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """There must be so many tokens."""
        rest = axes["T"] - self.count
        if rest < 0:
            raise ShapeError(f"{self.name}: axis T of x must be at least count, {self.count}: got {axes['T']}")
        return Aval((self.count, axes["D"]), dtype), Aval((rest, axes["D"]), dtype)
