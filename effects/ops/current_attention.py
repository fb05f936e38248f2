"""Attention of the new queries over the new tokens, causal within a request.

For token t, the i-th of its request, with the request's new tokens j = 0..i:

    s[j]       = scale * (q_latent[t, n] . latent[j] + q_rope[t, n] . k_rope[j])
    lse[t, n]  = log sum_j exp s[j]                      natural log
    cur[t, n]  = sum_j exp(s[j] - lse[t, n]) * latent[j]

The new tokens are on every rank, so each rank computes its own N heads and the
part enters the merge once.  Padding tokens (t >= sum query_lengths) get output
0 and LSE -inf, or LSE 0 where that saves a backend the look for rows that no
part saw: they are nobody's, and merge to 0 either way.  Source: the current part of the vLLM-Ascend split.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval, wide_dtype
from mla_fx.effects.op import Op
from mla_fx.effects.ops.history_attention import WORKSPACE, check_query_lengths
from mla_fx.effects.validate import number, word


@frozen
class CurrentAttention(Op):
    """Queries of N heads over the step's own keys.

    `q_latent` [T, N, L], `q_rope` [T, N, R], `latent` [T, L], `k_rope` [T, R], `query_lengths` host [B]
    -> `cur` [T, N, L] in the query dtype, `cur_lse` [T, N] float32 (float64 beside float64).
    """

    scale: float = field(validator=number(above=0))
    workspace: str = field(default=WORKSPACE, validator=word)
    operands: ClassVar = {
        "q_latent": "T N L",
        "q_rope": "T N R",
        "latent": "T L",
        "k_rope": "T R",
        "query_lengths": "B host",
    }
    results: ClassVar = ("cur", "cur_lse")

    @property
    def uses(self) -> tuple[str, ...]:
        """Its workspace, by name."""
        return (self.workspace,)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Query and keys have one dtype."""
        shape = (axes["T"], axes["N"])
        return Aval((*shape, axes["L"]), dtype), Aval(shape, wide_dtype(dtype))

    def work(self, axes: Mapping[str, int], lengths: Mapping[str, Sequence[int]]) -> int:
        """Score and value of every new token with itself and those before it."""
        pairs = sum(n * (n + 1) // 2 for n in lengths["query_lengths"])
        return pairs * axes["N"] * (2 * axes["L"] + axes["R"])

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Lengths fit the tokens of the step."""
        check_query_lengths(values["query_lengths"], avals["q_latent"].shape[0])
