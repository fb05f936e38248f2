"""Reference rule of `ops.GatingTopK`: one token's choice, written out, for every token."""

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
    """Score, drop groups, choose, weigh; of equal scores the lower one comes first."""
    weights = logits.new_zeros(len(logits), top_k)
    experts = torch.zeros(len(logits), top_k, dtype=torch.int32)
    for t, row in enumerate(logits):
        p = (1 / (1 + torch.exp(-row)) if scoring == "sigmoid" else torch.softmax(row, 0)).tolist()
        s = [a + b for a, b in zip(p, bias.tolist(), strict=True)]
        size = len(s) // groups
        members = [range(i * size, (i + 1) * size) for i in range(groups)]
        best = [sorted((s[x] for x in group), reverse=True) for group in members]
        g = [scores[0] + scores[1] if group_score == "top2" else scores[0] for scores in best]
        stay = sorted(range(groups), key=lambda i: (-g[i], i))[:top_groups]
        s = [s[x] if x // size in stay else -math.inf for x in range(len(s))]
        chosen = sorted(range(len(s)), key=lambda x: (-s[x], x))[:top_k]
        total = sum(p[x] for x in chosen) + 1e-20 if normalise else 1.0
        weights[t] = torch.tensor([p[x] / total * scale for x in chosen], dtype=logits.dtype)
        experts[t] = torch.tensor(chosen)
    return weights, experts
