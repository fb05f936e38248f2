"""Rule of `ops.SplitTokens`."""

import torch

from mla_fx.backends.device import Run


def rule(x: torch.Tensor, *, run: Run, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both parts copied: each has memory of its own, which its own stream may give back."""
    first, rest = (part.clone(memory_format=torch.contiguous_format) for part in (x[:count], x[count:]))
    return first, rest
