"""Project the rows of every expert with that expert's 8-bit weight: W8A8 dynamic.

    s[g]      = max_d |rows[g, d]| / 127
    q[g, d]   = round(rows[g, d] / s[g])                    to even; 0 where s[g] is 0
    out[g, f] = s[g] * scale[y, f] * sum_d q[g, d] * weight[y, f, d]      for the counts[y] rows g of expert y

As `quant_linear`, grouped as `grouped_linear`: rows behind the last count are
not read and their results hold anything.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.op import Op


@frozen
class QuantGroupedLinear(Op):
    """`rows` [Z, D], `weight` int8 [Y, F, D], `scale` [Y, F] (see `QuantLinear`), `counts` int64 [Y] -> [Z, F]."""

    operands: ClassVar = {"rows": "Z D", "weight": "Y F D int8", "scale": "Y F wide", "counts": "Y int64"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """A count for every expert, a scale for each of its output features."""
        return (Aval((axes["Z"], axes["F"]), dtype),)

    def work(self, axes: Mapping[str, int], lengths: Mapping[str, Sequence[int]]) -> int:
        """Where all rows are of the experts here, which is the most."""
        return axes["Z"] * axes["D"] * axes["F"]
