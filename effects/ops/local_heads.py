"""This rank's own heads of a query that was projected for all heads.

    q_local[t, n] = q[t, rank * N + n]

With a replicated query projection every rank has all heads, nothing is
gathered, and the current part takes its own slice.  Source: vLLM's `dcp_q_replicate`.
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.group import Group
from mla_fx.effects.op import Op
from mla_fx.effects.validate import instance


@frozen
class LocalHeads(Op):
    """`q` [T, H, D] -> [T, N, D] with N = H / W, W ranks of `group`."""

    group: Group = field(validator=instance(Group))
    operands: ClassVar = {"q": "T H D"}
    results: ClassVar = ("q_local",)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """The group must divide the heads."""
        if axes["H"] % self.group.size:
            raise ShapeError(f"{self.name}: axis H of q must be a multiple of {self.group}: got {axes['H']}")
        return (Aval((axes["T"], axes["H"] // self.group.size, axes["D"]), dtype),)
