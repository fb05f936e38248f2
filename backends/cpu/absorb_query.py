"""CPU rule of `ops.AbsorbQuery`."""

import torch

from mla_fx.backends.cpu.products import of_heads
from mla_fx.backends.device import Run


def rule(q: torch.Tensor, w_uk: torch.Tensor, *, run: Run, rope: int) -> tuple[torch.Tensor]:
    """One matrix product a head, on the first P features of the head."""
    heads, nope, _ = w_uk.shape
    return (of_heads(q.view(q.shape[0], heads, nope + rope)[..., :nope], w_uk),)
