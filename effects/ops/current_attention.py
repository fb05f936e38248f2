"""Attention of the new queries over the new tokens, causal within a request.

For token t, the i-th of its request, with the request's new tokens j = 0..i:

    s[j]       = scale * (q_latent[t, n] . latent[j] + q_rope[t, n] . k_rope[j])
    lse[t, n]  = log sum_j exp s[j]                      natural log
    cur[t, n]  = sum_j exp(s[j] - lse[t, n]) * latent[j]

The new tokens are on every rank, so each rank computes its own N heads and the
part enters the merge once.  Padding tokens (t >= sum query_lengths) get output
0 and LSE -inf.  Source: the current part of the vLLM-Ascend split.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, match, require_dtype, same_dtype, wide_dtype
from mla_fx.effects.op import Op
from mla_fx.effects.ops.history_attention import WORKSPACE, check_query_lengths


@frozen
class CurrentAttention(Op):
    """Queries of N heads over the step's own keys.

    `q_latent` [T, N, L], `q_rope` [T, N, R], `latent` [T, L], `k_rope` [T, R], `query_lengths` host [B]
    -> `cur` [T, N, L] in the query dtype, `cur_lse` [T, N] float32 (float64 beside float64).
    """

    scale: float
    operands: ClassVar = ("q_latent", "q_rope", "latent", "k_rope", "query_lengths")
    results: ClassVar = ("cur", "cur_lse")
    uses: ClassVar = (WORKSPACE,)

    def shape_rule(
        self, q_latent: Aval, q_rope: Aval, latent: Aval, k_rope: Aval, query_lengths: Aval
    ) -> tuple[Aval, ...]:
        """Query and keys have one dtype."""
        axes = match(
            self.name,
            q_latent=(q_latent, "T N L"),
            q_rope=(q_rope, "T N R"),
            latent=(latent, "T L"),
            k_rope=(k_rope, "T R"),
            query_lengths=(query_lengths, "B"),
        )
        dtype = same_dtype(self.name, q_latent=q_latent, q_rope=q_rope, latent=latent, k_rope=k_rope)
        require_dtype(self.name, "query_lengths", query_lengths, "host")
        return q_latent, Aval((axes["T"], axes["N"]), wide_dtype(dtype))

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Lengths fit the tokens of the step."""
        check_query_lengths(values["query_lengths"], avals["q_latent"].shape[0])
