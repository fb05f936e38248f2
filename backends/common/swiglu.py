"""Rule of `ops.Swiglu`."""

import torch
from torch.nn import functional

from mla_fx.backends.device import Run
from mla_fx.dtypes import wide


def rule(x: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Both factors in float32 (float64 beside float64), rounded once."""
    kind = wide(x.dtype)
    gate, up = x.to(kind).chunk(2, dim=1)
    return ((functional.silu(gate) * up).to(x.dtype).contiguous(),)
