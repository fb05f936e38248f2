"""Attention of the new queries over the new tokens, with a key and a value of every head.

For token t, the i-th of its request, with the request's new tokens j = 0..i:

    k[j, n]    = w_uk[n] latent[j]           v[j, n] = latent[j] w_uv[n]
    s[j]       = scale * (q[t, n] . k[j, n] + q_rope[t, n] . k_rope[j])
    lse[t, n]  = log sum_j exp s[j]                      natural log
    cur[t, n]  = sum_j exp(s[j] - lse[t, n]) * v[j, n]

`q[t, n]` are the P features without position of head n of the query.  What
`current_attention` computes in the latent, between `absorb_query` and `v_up`:
for a pair of tokens P + R + V multiply-adds a head in place of 2 L + R, and
for a token L (P + V) more.  Source: DeepSeek-V2 paper, section 2.1.2, before
the absorption of W_UK and W_UV.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import field, frozen
from attrs.validators import optional

from mla_fx.effects.aval import Aval, ShapeError, wide_dtype
from mla_fx.effects.group import Group
from mla_fx.effects.op import Op
from mla_fx.effects.ops.absorb_query import AbsorbQuery
from mla_fx.effects.ops.current_attention import CurrentAttention
from mla_fx.effects.ops.history_attention import WORKSPACE, check_query_lengths
from mla_fx.effects.ops.local_heads import LocalHeads
from mla_fx.effects.ops.v_up import VUp
from mla_fx.effects.step import Value, bind
from mla_fx.effects.validate import instance, number, word


@frozen
class ExpandedAttention(Op):
    """Queries of N heads, not absorbed, over the step's own keys.

    `q` [T, M * (P + R)], `q_rope` [T, N, R], `latent` [T, L], `k_rope` [T, R], `w_uk` [M, P, L], `w_uv` [H, L, V],
    `query_lengths` host [B]
    -> `cur` [T, N, V] in the query dtype, `cur_lse` [T, N] float32 (float64 beside float64).

    M and H are N, or N * W with a `group` of W ranks, of which the rank takes its own.
    """

    scale: float = field(validator=number(above=0))
    group: Group | None = field(default=None, validator=optional(instance(Group)))
    workspace: str = field(default=WORKSPACE, validator=word)
    operands: ClassVar = {
        "q": "T D",
        "q_rope": "T N R",
        "latent": "T L",
        "k_rope": "T R",
        "w_uk": "M P L",
        "w_uv": "H L V",
        "query_lengths": "B host",
    }
    results: ClassVar = ("cur", "cur_lse")

    @property
    def uses(self) -> tuple[str, ...]:
        """Its workspace, by name."""
        return (self.workspace,)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """`q` has the heads of `w_uk`; each weight is of the own heads or of the group's."""
        own, ranks, features = axes["N"], self.group.size if self.group else 1, axes["P"] + axes["R"]
        for axis, name in (("M", "w_uk"), ("H", "w_uv")):
            if axes[axis] not in (own, own * ranks):
                each = f" or {own * ranks}, for those on each of {self.group}" if self.group else ""
                raise ShapeError(
                    f"{self.name}: axis {axis} of {name} must be {own}, for the heads of q_rope{each}: got {axes[axis]}"
                )
        if axes["D"] != axes["M"] * features:
            raise ShapeError(
                f"{self.name}: axis 1 of q must be M * (P + R) = {axes['M']} * {features} = {axes['M'] * features}: "
                f"got {axes['D']}"
            )
        shape = (axes["T"], own)
        return Aval((*shape, axes["V"]), dtype), Aval(shape, wide_dtype(dtype))

    def work(self, axes: Mapping[str, int], lengths: Mapping[str, Sequence[int]]) -> int:
        """Of pairs as in `current_attention`, and of each token's own key and value."""
        pairs, width = sum(n * (n + 1) // 2 for n in lengths["query_lengths"]), axes["P"] + axes["V"]
        return axes["N"] * (pairs * (width + axes["R"]) + axes["T"] * axes["L"] * width)

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Lengths fit the tokens of the step."""
        check_query_lengths(values["query_lengths"], avals["q_rope"].shape[0])

    def definition(self, *operands: Value) -> tuple[Value, ...]:
        """In the latent: the query absorbed, the values projected up behind."""
        q, q_rope, latent, k_rope, w_uk, w_uv, query_lengths = operands
        _, heads, rope = q_rope.aval.shape
        (q_latent,) = bind(AbsorbQuery(rope), q, w_uk)
        if self.group and w_uk.aval.shape[0] != heads:
            (q_latent,) = bind(LocalHeads(self.group), q_latent)
        attend = CurrentAttention(self.scale, self.workspace)
        cur, cur_lse = bind(attend, q_latent, q_rope, latent, k_rope, query_lengths)
        group = self.group if w_uv.aval.shape[0] != heads else None
        return (*bind(VUp(group, flat=False), cur, w_uv), cur_lse)
