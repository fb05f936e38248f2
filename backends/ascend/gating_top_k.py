"""Ascend rule of `ops.GatingTopK`: npu_moe_gating_top_k for DeepSeek-V3's gate, plain torch for others.

The operator is used for sigmoid with normalised weights (its `norm_type` 1,
whose epsilon is the 1e-20 of the op), up to 2048 experts in groups of three
and more, which it pads to multiples of 32: the padded groups together may have
2048 places.  The rest, softmax, weights left as they are, small groups, is
for plain torch in float32.

Ties.  Plain torch sorts stably, so that of equal scores the lower one comes
first.  The operator's page describes it by a stable sort too; that its kernel
keeps to that is nowhere promised, and nothing here depends on it beyond the
choice between experts of one score: weights go by the experts that are given back.
Source: op-plugin, `npu_moe_gating_top_k`.
"""

import torch

from mla_fx.backends.common.gating_top_k import drop_groups
from mla_fx.backends.device import Run

_MOST = 2048


def fits(experts: int, groups: int) -> bool:
    """Whether the operator takes `experts` in `groups`.

    >>> [fits(*sizes) for sizes in ((256, 8), (64, 1), (2048, 1), (400, 100), (16, 8), (192, 64))]
    [True, True, True, False, False, True]
    """
    members = experts // groups
    return experts <= _MOST and members > 2 and -(-members // 32) * 32 * groups <= _MOST


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
    """Score, drop groups, choose, weigh; one operator where it fits."""
    tokens, experts = logits.shape
    if not tokens:
        return logits.new_empty((0, top_k)), logits.new_empty((0, top_k), dtype=torch.int32)
    if scoring == "sigmoid" and normalise and fits(experts, groups):
        weights, chosen, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits,
            top_k,
            bias=bias,
            k_group=top_groups,
            group_count=groups,
            group_select_mode=1 if group_score == "top2" else 0,
            norm_type=1,
            routed_scaling_factor=scale,
            eps=1e-20,
        )
        return weights, chosen
    p = torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, 1)
    s = drop_groups(p + bias, groups=groups, top_groups=top_groups, group_score=group_score)
    best = s.sort(dim=1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weights = p.gather(1, best)
    if normalise:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * scale, best.to(torch.int32)
