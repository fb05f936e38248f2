"""CUDA rule of `ops.CurrentAttention` in a captured program: lengths are on the device, so all is masks.

Every token is held against all T of the step.  Keys of others are zeroed before they are weighed, since weight 0 does
not wash out their NaN; so it costs T * T keys of L + R features, which is little for the few tokens that are captured.
What is not captured has the common rule.
"""

import math

import torch

from mla_fx.backends.cuda.calls.owners import owners
from mla_fx.backends.device import Run
from mla_fx.dtypes import wide


def captured(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    query_lengths: torch.Tensor,
    *,
    run: Run,
    scale: float,
    workspace: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`query_lengths` int64 [B] on the device; scores, softmax and sums in float32 (float64 beside float64)."""
    kind, tokens = wide(q_latent.dtype), q_latent.shape[0]
    request, real = owners(query_lengths, tokens)
    token = torch.arange(tokens, device=request.device)
    seen = (request.unsqueeze(1) == request) & (token.unsqueeze(1) >= token) & real.unsqueeze(1)
    keys, ropes = (part.to(kind).expand(tokens, -1, -1).masked_fill(~seen.unsqueeze(2), 0) for part in (latent, k_rope))
    scores = torch.bmm(q_latent.to(kind), keys.mT).baddbmm_(q_rope.to(kind), ropes.mT, beta=scale, alpha=scale)
    scores = scores.masked_fill(~seen.unsqueeze(1), -math.inf)
    nobodys = ~real.view(-1, 1, 1)
    weights = scores.softmax(2).masked_fill(nobodys, 0)
    return torch.bmm(weights, keys).to(q_latent.dtype), scores.logsumexp(2)
