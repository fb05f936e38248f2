"""CUDA rule of `ops.GatingTopK`: all tokens at once, with stable sorts where ties must go to the lower index."""

import torch

from mla_fx.backends.plain import drop_groups


def rule(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
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
