"""Rule of `ops.GateLogits`."""

import torch
from torch.nn import functional

from mla_fx.backends.device import Run
from mla_fx.dtypes import wide


def widened(weight: torch.Tensor) -> torch.Tensor:
    """The form that `rule` wants the weight in, float32 or wider: of a parameter it is made once, not in every step."""
    return weight.to(wide(weight.dtype))


def rule(x: torch.Tensor, weight: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """A product in float32 (float64 beside float64): in 16 bits it would be rounded on its way out."""
    kind = wide(x.dtype)
    return (functional.linear(x.to(kind), weight),)
