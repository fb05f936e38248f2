"""The rows that are asked for, as the last token of each request before the head.

out[o] = x[rows[o]]
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.op import Op
from mla_fx.effects.validate import InputError, within


@frozen
class TakeRows(Op):
    """`x` [T, D], `rows` int64 [O] in 0..T-1 -> [O, D]."""

    operands: ClassVar = {"x": "T D", "rows": "O int64"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Rows are counted from 0; a row may be asked for more than once."""
        return (Aval((axes["O"], axes["D"]), dtype),)

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Every row is there."""
        rows, count = values["rows"], avals["x"].shape[0]
        if not within(rows, 0, count):
            wrong = next(row for row in rows.tolist() if not 0 <= row < count)
            raise InputError(f"rows: each must be in 0..{count - 1}: got {wrong}")
