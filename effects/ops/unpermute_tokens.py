"""Bring the experts' rows back to their tokens, weighted.

    out[t] = sum_u weights[t, u] * rows[source[t, u]]        over the u with source[t, u] >= 0

A token none of whose experts is on this rank gets 0; the ranks' parts add up
in the all-reduce.  Source: `npu_moe_token_unpermute`; DeepSeek-V3 weighs the
experts' outputs, not their inputs.
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.op import Op


@frozen
class UnpermuteTokens(Op):
    """`rows` [T U, D], `source` int32 [T, U], `weights` [T, U] float32 (float64 beside float64) -> [T, D]."""

    operands: ClassVar = {"rows": "Z D", "source": "T U int32", "weights": "T U wide"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """As many rows as `permute_tokens` gave."""
        if axes["Z"] != axes["T"] * axes["U"]:
            raise ShapeError(
                f"{self.name}: axis Z of rows must be T U = {axes['T'] * axes['U']}, from source: got {axes['Z']}"
            )
        return (Aval((axes["T"], axes["D"]), dtype),)
