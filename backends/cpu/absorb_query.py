"""CPU rule of `ops.AbsorbQuery`."""

import torch

from mla_fx.backends.cpu.products import batched
from mla_fx.backends.device import Run


def rule(q: torch.Tensor, w_uk: torch.Tensor, *, run: Run, rope: int) -> tuple[torch.Tensor]:
    """One matrix product a head, on the first P features of the head."""
    heads, nope, _ = w_uk.shape
    q_nope = q.view(q.shape[0], heads, nope + rope)[..., :nope]
    return (batched(q_nope.transpose(0, 1), w_uk).transpose(0, 1).contiguous(),)
