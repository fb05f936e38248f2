"""Exchange history partials by heads: each rank gets what all ranks computed for its own heads.

    recv[s, t, n]     of rank r = out of rank s [t, r * N + n]
    recv_lse[s, t, n] of rank r = lse of rank s [t, r * N + n]      bit for bit

How the two travel is the backend's: one message, an output and its LSE's bits
side by side, in what we know.  Source: vLLM's `a2a` DCP backend.
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval, ShapeError, wide_dtype
from mla_fx.effects.group import Group
from mla_fx.effects.op import Op
from mla_fx.effects.validate import instance


@frozen
class AllToAll(Op):
    """Own heads' partials of all ranks, with N = H / W and W the size of `group`.

    `out` [T, H, L], `lse` [T, H] float32 (float64 beside float64) -> `recv` [W, T, N, L], `recv_lse` [W, T, N].
    """

    group: Group = field(validator=instance(Group))
    operands: ClassVar = {"out": "T H L", "lse": "T H wide"}
    results: ClassVar = ("recv", "recv_lse")
    communicates: ClassVar = "all_to_all"

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """The group must divide the heads."""
        ranks = self.group.size
        if axes["H"] % ranks:
            raise ShapeError(f"{self.name}: axis H of out must be a multiple of {self.group}: got {axes['H']}")
        shape = (ranks, axes["T"], axes["H"] // ranks)
        return Aval((*shape, axes["L"]), dtype), Aval(shape, wide_dtype(dtype))
