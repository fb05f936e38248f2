"""CPU rule of `ops.GateLogits`."""

import torch

from mla_fx.backends.common.gate_logits import widened
from mla_fx.backends.cpu.products import linear, packed
from mla_fx.backends.device import Run
from mla_fx.backends.table import Formed


def ready(weight: torch.Tensor) -> Formed:
    """The form that `rule` wants the weight in: widened, and packed for its products."""
    return packed(widened(weight))


def rule(x: torch.Tensor, weight: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """A product in float32 (float64 beside float64): a token's logits are the same bits whatever is beside it."""
    return (linear(x.to(weight.dtype), weight),)
