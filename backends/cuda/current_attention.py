"""CUDA rule of `ops.CurrentAttention`."""

import torch

from mla_fx.backends.plain import attend_new
from mla_fx.backends.torch_streams import Scratch

#: Tokens widened at a time.
TOKENS = 256


def rule(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    query_lengths: tuple[int, ...],
    *,
    scale: float,
    workspace: Scratch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, softmax and accumulation in float32 (float64 beside float64); `workspace` is for operators that ask."""
    return attend_new(q_latent, q_rope, latent, k_rope, query_lengths, scale=scale, tokens=TOKENS)
