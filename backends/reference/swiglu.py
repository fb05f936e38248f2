"""Reference rule of `ops.Swiglu`."""

import torch

from mla_fx.backends.device import Run


def rule(x: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """out[t, f] = silu(x[t, f]) * x[t, F + f], silu(a) = a / (1 + exp(-a))."""
    gate, up = x.chunk(2, dim=1)
    return ((gate / (1 + torch.exp(-gate)) * up).contiguous(),)
