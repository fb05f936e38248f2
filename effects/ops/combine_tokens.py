"""Bring back what the ranks of its experts have made of each token, and add it up.

With `rows[j]` of rank r for token t, which `dispatch_tokens` has sent there for the same `experts`:

    out[t] = sum_r rows[j] of rank r        r in rank order, over the ranks that t was sent to
    out[t] = 0                              for the tokens of the other ranks of `among`

The sum is accumulated in float32 (float64 beside float64) and rounded once.  Of each token one rank of a replica gives
the sum and the others zeros, so the all-reduce that closes a layer brings the tokens together again, exactly.
Source: as `dispatch_tokens`.
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.group import Group
from mla_fx.effects.op import Op
from mla_fx.effects.ops.dispatch_tokens import check_among
from mla_fx.effects.validate import instance, integer


@frozen
class CombineTokens(Op):
    """`rows` [J, D], `experts` int32 [T, U], `counts` int64 [W] as `dispatch_tokens` gave them, Y = `own` -> [T, D]."""

    own: int = field(validator=integer(1))
    group: Group = field(validator=instance(Group))
    among: Group = field(validator=instance(Group))
    operands: ClassVar = {"rows": "J D", "experts": "T U int32", "counts": "W int64"}
    communicates: ClassVar = "all_to_all_v"
    waits: ClassVar = True

    def __attrs_post_init__(self) -> None:
        check_among(self.among, self.group)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """As many rows as `dispatch_tokens` gave."""
        rows = self.group.size * self.among.share(axes["T"])
        if (axes["J"], axes["W"]) != (rows, self.group.size):
            raise ShapeError(
                f"{self.name}: axes J of rows and W of counts must be {rows} and {self.group.size}, for {axes['T']} "
                f"tokens over {self.group} of {self.among}: got {axes['J']} and {axes['W']}"
            )
        return (Aval((axes["T"], axes["D"]), dtype),)

    def handed(self, *operands: Aval) -> int:
        """At most, in the mean over ranks: as many rows as were dispatched.  One rank may return W - 1 shares."""
        rows, experts, _ = operands
        tokens, pairs = experts.shape
        row = rows.bytes_ // rows.shape[0] if rows.shape[0] else 0
        return self.among.share(tokens) * min(pairs, self.group.size - 1) * row
