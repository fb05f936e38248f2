"""Project the rows of every expert with that expert's 8-bit weight: W8A8 dynamic.

    s[g]      = max_d |rows[g, d]| / 127
    q[g, d]   = round(rows[g, d] / s[g])                    to even; 0 where s[g] is 0
    out[g, f] = s[g] * scale[y, f] * sum_d q[g, d] * weight[y, f, d]      for the counts[y] rows g of expert y

As `quant_linear`, grouped as `grouped_linear`: rows behind the last count are
not read and their results hold anything.
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import FLOATS, Aval, match, require_dtype, wide_dtype
from mla_fx.effects.op import Op


@frozen
class QuantGroupedLinear(Op):
    """`rows` [Z, D], `weight` int8 [Y, F, D], `scale` [Y, F] (see `QuantLinear`), `counts` int64 [Y] -> [Z, F]."""

    operands: ClassVar = ("rows", "weight", "scale", "counts")

    def shape_rule(self, rows: Aval, weight: Aval, scale: Aval, counts: Aval) -> tuple[Aval, ...]:
        """A count for every expert, a scale for each of its output features."""
        axes = match(
            self.name, rows=(rows, "Z D"), weight=(weight, "Y F D"), scale=(scale, "Y F"), counts=(counts, "Y")
        )
        require_dtype(self.name, "rows", rows, *FLOATS)
        require_dtype(self.name, "weight", weight, "int8")
        require_dtype(self.name, "scale", scale, wide_dtype(rows.dtype))
        require_dtype(self.name, "counts", counts, "int64")
        return (Aval((axes["Z"], axes["F"]), rows.dtype),)
