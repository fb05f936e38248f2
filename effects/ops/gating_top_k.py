"""Which experts a token goes to, and with what weights.

    p[t, x]   = sigmoid(logits[t, x])  or  softmax_x(logits[t, x])
    s[t, x]   = p[t, x] + bias[x]                                     for the selection only
    g[t, i]   = sum of the two best s in group i, or the best one     X / groups neighbours a group
    s[t, x]   = -inf  where the group of x is not among the best top_groups
    experts[t, u] = the top_k best x by s, best first
    w[t, u]   = p[t, experts[t, u]],  divided by their sum + 1e-20 when `normalise`
    weights[t, u] = w[t, u] * scale

Of equal scores the lower expert, and the lower group, comes first.  Dropped
groups are at -inf, not at 0: a biased score may be negative and must still win
over them.  Sources: DeepSeek-V3 (sigmoid, two best, bias, arXiv 2412.19437),
DeepSeek-V2 (softmax, the best one, no bias: give zeros).
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.op import Op
from mla_fx.effects.validate import InputError, boolean, integer, number, one_of


@frozen(kw_only=True)
class GatingTopK(Op):
    """`logits` [T, X], `bias` [X], both float32 (or float64) -> `weights` [T, U] like them, `experts` int32 [T, U]."""

    top_k: int = field(validator=integer(1))
    groups: int = field(default=1, validator=integer(1))
    top_groups: int = field(default=1, validator=integer(1))
    scoring: str = field(default="sigmoid", validator=one_of("sigmoid", "softmax"))
    group_score: str = field(default="top2", validator=one_of("top2", "max"))
    normalise: bool = field(default=True, validator=boolean)
    scale: float = field(default=1.0, validator=number(above=0))
    operands: ClassVar = {"logits": "T X wide", "bias": "X wide"}
    results: ClassVar = ("weights", "experts")

    def __attrs_post_init__(self) -> None:
        if self.top_groups > self.groups:
            raise InputError(f"top_groups: must be in 1..{self.groups}, of so many groups: got {self.top_groups}")

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Groups divide the experts, and the groups that stay hold enough of them."""
        experts = axes["X"]
        if experts % self.groups:
            raise ShapeError(f"{self.name}: groups must divide axis X, {experts}: got {self.groups}")
        members = experts // self.groups
        if self.group_score == "top2" and members < 2:
            raise ShapeError(f"{self.name}: a group must have two experts for the sum of its two best: got {members}")
        if self.top_k > self.top_groups * members:
            raise ShapeError(
                f"{self.name}: top_k must be in 1..{self.top_groups * members}, {self.top_groups} groups of {members}: "
                f"got {self.top_k}"
            )
        return Aval((axes["T"], self.top_k), dtype), Aval((axes["T"], self.top_k), "int32")
