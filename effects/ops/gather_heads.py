"""All-gather the queries of the group's heads, in rank order.

    q_latent_all[t, r * N + n] = q_latent of rank r [t, n];  the same for q_rope

One message of L + R features a head.  Source: the DCP query gather of vLLM
(all-gather on the head axis).
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.group import Group
from mla_fx.effects.op import Op
from mla_fx.effects.validate import instance


@frozen
class GatherHeads(Op):
    """`q_latent` [T, N, L], `q_rope` [T, N, R] -> [T, H, L], [T, H, R] with H = N * W, W ranks of `group`."""

    group: Group = field(validator=instance(Group))
    operands: ClassVar = {"q_latent": "T N L", "q_rope": "T N R"}
    results: ClassVar = ("q_latent_all", "q_rope_all")
    communicates: ClassVar = "all_gather"
    alike: ClassVar = True

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Heads are multiplied by the ranks."""
        heads = axes["N"] * self.group.size
        return Aval((axes["T"], heads, axes["L"]), dtype), Aval((axes["T"], heads, axes["R"]), dtype)
