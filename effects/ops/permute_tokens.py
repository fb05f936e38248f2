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

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.group import Group
from mla_fx.effects.op import Op
from mla_fx.effects.validate import instance, integer


@frozen
class PermuteTokens(Op):
    """`x` [T, D], `experts` int32 [T, U], Y = `own` -> `rows` [T U, D], `counts` int64 [Y], `source` int32 [T, U]."""

    own: int = field(validator=integer(1))
    group: Group = field(validator=instance(Group))
    operands: ClassVar = {"x": "T D", "experts": "T U int32"}
    results: ClassVar = ("rows", "counts", "source")

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """A row for every pair, since all tokens may come to this rank."""
        pairs = (axes["T"], axes["U"])
        rows = Aval((axes["T"] * axes["U"], axes["D"]), dtype)
        return rows, Aval((self.own,), "int64"), Aval(pairs, "int32")
