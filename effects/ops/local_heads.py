"""This rank's own heads of a query that was projected for all heads.

    q_local[t, n] = q[t, rank * N + n]

With a replicated query projection every rank has all heads, nothing is
gathered, and the current part takes its own slice.  Source: vLLM's `dcp_q_replicate`.
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import FLOATS, Aval, ShapeError, match, require_dtype
from mla_fx.effects.op import Op


@frozen
class LocalHeads(Op):
    """`q` [T, H, D] -> [T, N, D] with N = H / `ranks`."""

    ranks: int
    operands: ClassVar = ("q",)
    results: ClassVar = ("q_local",)
    needs_rank: ClassVar = True

    def shape_rule(self, q: Aval) -> tuple[Aval, ...]:
        """The group must divide the heads."""
        axes = match(self.name, q=(q, "T H D"))
        require_dtype(self.name, "q", q, *FLOATS)
        if axes["H"] % self.ranks:
            raise ShapeError(f"{self.name}: axis H of q must be a multiple of the ranks, {self.ranks}: got {axes['H']}")
        return (Aval((axes["T"], axes["H"] // self.ranks, axes["D"]), q.dtype),)
