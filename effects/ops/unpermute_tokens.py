"""Bring the experts' rows back to their tokens, weighted.

    out[t] = sum_u weights[t, u] * rows[source[t, u]]        over the u with source[t, u] >= 0

A token none of whose experts is on this rank gets 0; the ranks' parts add up
in the all-reduce.  Source: `npu_moe_token_unpermute`; DeepSeek-V3 weighs the
experts' outputs, not their inputs.
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import FLOATS, Aval, ShapeError, match, require_dtype, wide_dtype
from mla_fx.effects.op import Op


@frozen
class UnpermuteTokens(Op):
    """`rows` [T U, D], `source` int32 [T, U], `weights` [T, U] float32 (float64 beside float64) -> [T, D]."""

    operands: ClassVar = ("rows", "source", "weights")

    def shape_rule(self, rows: Aval, source: Aval, weights: Aval) -> tuple[Aval, ...]:
        """As many rows as `permute_tokens` gave."""
        axes = match(self.name, rows=(rows, "Z D"), source=(source, "T U"), weights=(weights, "T U"))
        require_dtype(self.name, "rows", rows, *FLOATS)
        require_dtype(self.name, "source", source, "int32")
        require_dtype(self.name, "weights", weights, wide_dtype(rows.dtype))
        if axes["Z"] != axes["T"] * axes["U"]:
            raise ShapeError(
                f"{self.name}: axis Z of rows must be T U = {axes['T'] * axes['U']}, from source: got {axes['Z']}"
            )
        return (Aval((axes["T"], axes["D"]), rows.dtype),)
