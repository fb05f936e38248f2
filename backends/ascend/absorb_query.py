"""Ascend rule of `ops.AbsorbQuery`."""

import torch

from mla_fx.backends.ascend.calls.projection import per_head
from mla_fx.backends.device import Run


def rule(q: torch.Tensor, w_uk: torch.Tensor, *, run: Run, rope: int) -> tuple[torch.Tensor]:
    """A matrix for each head, on the first P features of the head, read where they lie."""
    heads, nope, _ = w_uk.shape
    return (per_head(q.reshape(q.shape[0], heads, nope + rope)[..., :nope], w_uk),)
