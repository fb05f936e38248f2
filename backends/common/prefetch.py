"""Rule of `ops.Prefetch` where there is no operator for it."""

import torch

from mla_fx.backends.device import Run


def rule(weight: torch.Tensor, after: torch.Tensor, *, run: Run) -> tuple[()]:
    """Nothing: what is read is brought by its reader."""
    return ()
