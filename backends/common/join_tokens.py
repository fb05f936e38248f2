"""Rule of `ops.JoinTokens`."""

import torch

from mla_fx.backends.device import Run


def rule(first: torch.Tensor, rest: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """One below the other, copied."""
    return (torch.cat((first, rest)).contiguous(),)
