"""Bring the tokens of this rank's experts together, expert after expert.

Of all pairs (t, u) those with rank * Y <= experts[t, u] < (rank + 1) * Y are
this rank's.  Sorted by expert, and within one by t, then u, pair number g gives

    rows[g]      = x[t]
    source[t, u] = g                      -1 for the pairs of other ranks
    counts[y]    = pairs of expert rank * Y + y

Rows behind the last pair hold anything.  The shapes do not depend on the
choice of experts, so a program serves every step.  Source: expert parallelism
with replicated tokens; `npu_moe_init_routing_v2`.
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import FLOATS, Aval, match, require_dtype
from mla_fx.effects.op import Op


@frozen
class PermuteTokens(Op):
    """`x` [T, D], `experts` int32 [T, U], Y = `own` -> `rows` [T U, D], `counts` int64 [Y], `source` int32 [T, U]."""

    own: int
    ranks: int
    operands: ClassVar = ("x", "experts")
    results: ClassVar = ("rows", "counts", "source")
    needs_rank: ClassVar = True

    def shape_rule(self, x: Aval, experts: Aval) -> tuple[Aval, ...]:
        """A row for every pair, since all tokens may come to this rank."""
        axes = match(self.name, x=(x, "T D"), experts=(experts, "T U"))
        require_dtype(self.name, "x", x, *FLOATS)
        require_dtype(self.name, "experts", experts, "int32")
        return Aval((axes["T"] * axes["U"], axes["D"]), x.dtype), Aval((self.own,), "int64"), experts
