"""Ascend rule of `ops.CurrentAttention`: the new tokens as keys without paging, the causal template as mask.

Rows that no request owns have output 0 and LSE 0, so that a merge has a part
for every row, and need not look for rows without one (`fused.merge_attention`).
"""

from typing import Any

import torch

from mla_fx.backends.ascend.calls import attention
from mla_fx.backends.ascend.calls.attention import causal_mask, fused, plain, unseen
from mla_fx.backends.device import Run
from mla_fx.effects import Aval, ops


def takes(op: ops.CurrentAttention, q_latent: Aval, q_rope: Aval, *keys: Aval) -> str | None:
    """Queries as in any attention here."""
    return attention.takes(q_latent, q_rope)


def rule(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    query_lengths: tuple[int, ...],
    *,
    run: Run,
    scale: float,
    workspace: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without paging both length lists are cumulative and equal: a request's keys are its new tokens."""
    if q_latent.dtype != torch.float32:
        keys = [part.contiguous().unsqueeze(1) for part in (latent, k_rope)]
        how: dict[str, Any] = {"scale": scale, "atten_mask": causal_mask(run), "sparse_mode": 3}
        how["workspace"] = run.scratch(workspace)
        return fused(q_latent, q_rope, *keys, host=(query_lengths,), padding=0, **how)
    cur, lse = unseen(q_latent)
    end = 0
    for length in query_lengths:
        start, end = end, end + length
        if length:
            rows = slice(start, end)
            hidden = torch.ones((length, length), dtype=torch.bool, device=latent.device).triu(1)
            cur[rows], lse[rows] = plain(
                q_latent[rows], q_rope[rows], latent[rows], k_rope[rows], scale=scale, hidden=hidden
            )
    if end < len(lse):
        lse[end:].zero_()
    return cur, lse
