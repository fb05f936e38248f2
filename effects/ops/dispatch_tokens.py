"""Send each token to the ranks of its experts, where replicas have tokens of their own.

The ranks of a replica, the group `among`, have the same T tokens; each sends its share, T / tp of them rounded up, so
that what is done with a token is decided once, by one rank.  Token t of a rank's share goes once to every rank r with

    experts[t, u] // Y = r                  for some u

A rank is brought what all ranks of `group` have sent to it, rank after rank, and of one by t:

    rows[j], row_weights[j], row_experts[j] = x[t], weights[t], experts[t]
    counts[r]                               = rows that rank r has sent

Behind the last row, rows hold anything, weights 0, and experts those of another rank, for which nothing is done here.
The shapes are those of the most that can come, all tokens of all replicas, and do not depend on the choice; what goes
over the wire does, and the host waits to know it.  A rank without tokens takes part, one without rows too.
Source: expert parallelism over data-parallel batches, as the dispatch of DeepEP and of vLLM's all-to-all backends.
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval, wide_dtype
from mla_fx.effects.group import Group
from mla_fx.effects.op import Op
from mla_fx.effects.validate import InputError, instance, integer


def check_among(among: Group, group: Group) -> None:
    """Raise `InputError` unless the ranks of `group` are so many replicas of `among`."""
    if group.size % among.size:
        raise InputError(f"among: must be of a size that divides {group}: got {among}")


@frozen
class DispatchTokens(Op):
    """`x` [T, D], `weights` [T, U] float32 (float64 beside float64), `experts` int32 [T, U], Y = `own`, J = W T / tp
    -> `rows` [J, D], `row_weights` [J, U], `row_experts` int32 [J, U], `counts` int64 [W], W ranks of `group`.
    """

    own: int = field(validator=integer(1))
    group: Group = field(validator=instance(Group))
    among: Group = field(validator=instance(Group))
    operands: ClassVar = {"x": "T D", "weights": "T U wide", "experts": "T U int32"}
    results: ClassVar = ("rows", "row_weights", "row_experts", "counts")
    communicates: ClassVar = "all_to_all_v"
    waits: ClassVar = True

    def __attrs_post_init__(self) -> None:
        check_among(self.among, self.group)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """A row for every token of every rank's share, since all may come to this rank."""
        rows, pairs = self.group.size * self.among.share(axes["T"]), axes["U"]
        shapes = (Aval((rows, axes["D"]), dtype), Aval((rows, pairs), wide_dtype(dtype)), Aval((rows, pairs), "int32"))
        return *shapes, Aval((self.group.size,), "int64")

    def handed(self, *operands: Aval) -> int:
        """At most: every token of the share to min(U, W - 1) other ranks, with its weights and experts."""
        tokens, pairs = operands[2].shape
        row = sum(one.bytes_ for one in operands) // tokens if tokens else 0
        return self.among.share(tokens) * min(pairs, self.group.size - 1) * row
