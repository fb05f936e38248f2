"""Project the merged latent of every head up to its values.

    heads[t, n * V + v] = sum_l attn[t, n, l] * w_uv[n, l, v]

Not flat, the result is heads[t, n, v].  With a group, `w_uv` is of all its
heads, of which the rank takes its own, w_uv[rank * N + n].

Source: the value half of `kv_b_proj`, applied after the attention because
attention and projection are both linear in the latent.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from attrs import field, frozen
from attrs.validators import optional

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.group import Group
from mla_fx.effects.op import Op
from mla_fx.effects.validate import boolean, instance


@frozen
class VUp(Op):
    """`attn` [T, N, L], `w_uv` [H, L, V] with H = N, or N * W with a `group` of W ranks
    -> [T, N * V], or [T, N, V] where it is not `flat`.
    """

    group: Group | None = field(default=None, validator=optional(instance(Group)))
    flat: bool = field(default=True, validator=boolean)
    operands: ClassVar = {"attn": "T N L", "w_uv": "H L V"}
    results: ClassVar = ("heads",)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Heads and latent must agree."""
        own, ranks = axes["N"], self.group.size if self.group else 1
        if axes["H"] != own * ranks:
            each = f" on each of {self.group}" if self.group else ""
            raise ShapeError(
                f"{self.name}: axis H of w_uv must be {own * ranks}, for the {own} heads of attn{each}: got {axes['H']}"
            )
        shape = (own * axes["V"],) if self.flat else (own, axes["V"])
        return (Aval((axes["T"], *shape), dtype),)

    def work(self, axes: Mapping[str, int], lengths: Mapping[str, Sequence[int]]) -> int:
        """A product for each token and head."""
        return axes["T"] * axes["N"] * axes["L"] * axes["V"]
