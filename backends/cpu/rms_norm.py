"""CPU rule of `ops.RmsNorm`."""

import torch

from mla_fx.backends.common import rms_norm
from mla_fx.backends.cpu.kernel import FORMATS, function
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.device import Run


def rule(x: torch.Tensor, weight: torch.Tensor, *, run: Run, epsilon: float) -> tuple[torch.Tensor]:
    """Squares summed in float32 (float64 beside float64), rounded once."""
    if not takes(x, weight):
        return rms_norm.rule(x, weight, run=run, epsilon=epsilon)
    rows, features = len(x), len(weight)
    out = x.new_empty(rows, features)
    norm = function("mla_fx_rms_norm", "iplppllfi")
    at = x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr()
    norm(FORMATS[x.dtype], *at, rows, features, epsilon, torch.get_num_threads())
    return (out,)
