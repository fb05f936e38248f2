"""Rule of `ops.GatingTopK`: all tokens at once, with stable sorts where ties must go to the lower index."""

import math

import torch

from mla_fx.backends.device import Run


def rule(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    run: Run,
    top_k: int,
    groups: int,
    top_groups: int,
    scoring: str,
    group_score: str,
    normalise: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score, drop groups, choose, weigh."""
    # Not torch.sigmoid: its last bits depend on where in a row a logit lies, and equal logits must give equal scores.
    p = 1 / (1 + torch.exp(-logits)) if scoring == "sigmoid" else logits.softmax(1)
    s = drop_groups(p + bias, groups=groups, top_groups=top_groups, group_score=group_score)
    chosen = s.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = p.gather(1, chosen)
    if normalise:
        weights /= weights.sum(1, keepdim=True) + 1e-20
    return weights.mul_(scale), chosen.to(torch.int32).contiguous()


def drop_groups(s: torch.Tensor, *, groups: int, top_groups: int, group_score: str) -> torch.Tensor:
    """Scores `s` [T, X] of experts with all groups but the best `top_groups` at -inf.  See `ops.GatingTopK`."""
    if top_groups == groups:
        return s
    tokens, count = s.shape
    grouped = s.view(tokens, groups, count // groups)
    g = grouped.sort(dim=2, descending=True).values[..., :2].sum(2) if group_score == "top2" else grouped.amax(2)
    dropped = g.sort(dim=1, descending=True, stable=True).indices[:, top_groups:]
    return grouped.scatter(1, dropped.unsqueeze(2).expand(-1, -1, count // groups), -math.inf).view(tokens, count)
