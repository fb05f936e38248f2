"""Reference rule of `ops.AbsorbQuery`."""

import torch

from mla_fx.backends.device import Run


def rule(q: torch.Tensor, w_uk: torch.Tensor, *, run: Run, rope: int) -> tuple[torch.Tensor]:
    """q_latent[t, n, l] = sum_p q[t, n, p] * w_uk[n, p, l] for p < P; `q` has P + `rope` features a head."""
    heads, nope, _ = w_uk.shape
    q_nope = q.reshape(len(q), heads, nope + rope)[..., :nope]
    return (torch.einsum("tnp,npl->tnl", q_nope, w_uk).contiguous(),)
