"""Ascend rule of `ops.ExpandedAttention`: fused infer attention in the form of a prompt, the causal template as mask.

Two products expand keys and values for all heads at once, from the weights as
they lie: that of the values as the L rows of a matrix, for which the own heads
of `w_uv` are copied into order.  The operator wants the position of a key for
every head.  Sizes that it does not take are attended to in the latent, as the
definition says; float32 is plain torch.  Rows that no request owns have output
0 and LSE 0, as those of `ops.CurrentAttention` here.
"""

from typing import Any

import torch

from mla_fx.backends.ascend import absorb_query, current_attention, v_up
from mla_fx.backends.ascend.calls import attention
from mla_fx.backends.ascend.calls.attention import causal_mask, expanded
from mla_fx.backends.ascend.calls.dtypes import wrong_dtype
from mla_fx.backends.common import expanded_attention
from mla_fx.backends.common.local_heads import own_heads
from mla_fx.backends.device import Run
from mla_fx.effects import Aval, Group, ops


def takes(op: ops.ExpandedAttention, q: Aval, q_rope: Aval, latent: Aval, *others: Aval) -> str | None:
    """What attention in the latent takes, which is what other sizes come to."""
    if why := wrong_dtype("q", q):
        return why
    return attention.takes(Aval((*q_rope.shape[:2], latent.shape[1]), q.dtype), q_rope)


def rule(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    query_lengths: tuple[int, ...],
    *,
    run: Run,
    scale: float,
    group: Group | None,
    workspace: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in the query's dtype."""
    tokens, heads, rope = q_rope.shape
    every, nope, inner = w_uk.shape
    if q.dtype == torch.float32:
        given: tuple[Any, ...] = (q, q_rope, latent, k_rope, w_uk, w_uv, query_lengths)
        return expanded_attention.rule(*given, run=run, scale=scale, group=group, workspace=workspace)
    q = own_heads(q.reshape(tokens, every, nope + rope), heads, 1, run)
    w_uk, w_uv = own_heads(w_uk, heads, 0, run), own_heads(w_uv, heads, 0, run)
    if not attention.expands(nope, rope, w_uv.shape[2]):
        (q_latent,) = absorb_query.rule(q.flatten(1), w_uk, run=run, rope=rope)
        given = (q_latent, q_rope, latent, k_rope, query_lengths)
        cur, lse = current_attention.rule(*given, run=run, scale=scale, workspace=workspace)
        return (*v_up.rule(cur, w_uv, run=run, group=None, flat=False), lse)
    k = torch.mm(latent, w_uk.reshape(-1, inner).t()).view(tokens, heads, nope)
    v = torch.mm(latent, w_uv.transpose(0, 1).reshape(inner, -1)).view(tokens, heads, w_uv.shape[2])
    ropes = k_rope.unsqueeze(1).expand(-1, heads, -1).contiguous()
    how: dict[str, Any] = {
        "scale": scale,
        "atten_mask": causal_mask(run),
        "sparse_mode": 3,
        "workspace": run.scratch(workspace),
    }
    return expanded(q[..., :nope], q_rope, k, ropes, v, lengths=query_lengths, **how)
