"""CPU rule of `ops.ExpandedAttention`: the shared one, with torch's flash kernel for CPUs.

The kernel wants one width for queries, keys and values, so values are padded
with zeros.  With heads of 192 and 128 features it took 0.7 to 0.9 of the time
of tiles of matrix products and softmax, on one core with AVX2.
"""

import torch
from torch.nn import functional

from mla_fx.backends.common import expanded_attention as shared
from mla_fx.backends.device import Run
from mla_fx.effects import Group


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
    """Keys, values, scores, softmax and accumulation in float32 (float64 beside float64); result in the query dtype."""
    return shared.by_request(attend, q, q_rope, latent, k_rope, w_uk, w_uv, query_lengths, run=run, scale=scale)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attend` of the shared rule; n and m are at least 1."""
    width = max(k.shape[2], v.shape[2])
    # Of a row whose scores are all NaN the kernel may give 0: what is not finite goes the plain way, and is seen.
    if not torch.isfinite(q.sum() + k.sum()):
        return shared.attend(q, k, v, scale=scale, causal=causal)
    parts = (functional.pad(part, (0, width - part.shape[2])).unsqueeze(0) for part in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, causal, scale=scale)
    return out[0, ..., : v.shape[2]], lse[0]
