"""Ascend rule of `ops.UnpermuteTokens`: npu_moe_token_unpermute, for all pairs of all ranks.

The operator wants an index without negative numbers and without doubles, as
from a sort of all pairs.  So the pairs of other ranks, whose `source` is -1,
take the rows that no pair of this rank has, those behind the last pair: the
first such pair takes the last row, and so on backwards.  Their weight is 0.
What these rows hold is unspecified, and 0 * NaN is NaN, so they are zeroed
first, in a copy.  (The kernel of ops-transformer skips rows of weight 0; no
page promises that.)  A token's infinities thus stay its own.

The pairs of this rank must have the rows from 0 on, as `permute_tokens` gives
them.  Weights are float32 beside any dtype of the rows; the sum is in float32
and rounded once.
"""

import torch

from mla_fx.backends.device import Run
from mla_fx.effects import Aval, ops

#: The most pairs a token that the operator takes.
PAIRS = 512


def takes(op: ops.UnpermuteTokens, rows: Aval, source: Aval, weights: Aval) -> str | None:
    """As many pairs a token as the operator takes."""
    top_k = source.shape[1]
    return f"top_k: unpermuting on ascend takes at most {PAIRS} experts a token: got {top_k}" if top_k > PAIRS else None


def rule(rows: torch.Tensor, source: torch.Tensor, weights: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Every pair gets a row of its own, without asking the device how many there are."""
    tokens, top_k = source.shape
    if not rows.numel():
        return (rows.new_zeros((tokens, rows.shape[1])),)
    pairs = tokens * top_k
    elsewhere = source < 0
    behind = elsewhere.reshape(-1).to(torch.int32).cumsum(0, dtype=torch.int32)  # how many so far, this pair included
    index = torch.where(elsewhere.reshape(-1), pairs - behind, source.reshape(-1))
    from_the_end = torch.arange(pairs, 0, -1, dtype=torch.int32, device=rows.device)
    rows = rows.masked_fill((from_the_end <= behind[-1:]).unsqueeze(1), 0)
    return (torch.ops.npu.npu_moe_token_unpermute(rows, index, weights.masked_fill(elsewhere, 0)),)
