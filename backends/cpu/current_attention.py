"""CPU rule of `ops.CurrentAttention`: the compiled kernel, or the shared rule where there is none or in float64."""

import torch

from mla_fx.backends import common
from mla_fx.backends.cpu.kernel import attention
from mla_fx.backends.device import Run


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
    """Scores, softmax and accumulation in float32 (float64 beside float64); result in the query dtype."""
    operands = (q_latent, q_rope, latent, k_rope, query_lengths)
    if attention.serves(q_latent, latent, k_rope):
        return attention.current(*operands, scale)
    return common.current_attention.rule(*operands, run=run, scale=scale, workspace=workspace)
