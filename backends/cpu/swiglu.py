"""CPU rule of `ops.Swiglu`."""

import torch

from mla_fx.backends.common import swiglu
from mla_fx.backends.cpu.kernel import FORMATS, function
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.device import Run


def rule(x: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Both factors in float32 (float64 beside float64), rounded once."""
    if not takes(x):
        return swiglu.rule(x, run=run)
    rows, features = len(x), x.shape[1] // 2
    out = x.new_empty(rows, features)
    gated = function("mla_fx_swiglu", "iplplli")
    gated(FORMATS[x.dtype], x.data_ptr(), x.stride(0), out.data_ptr(), rows, features, torch.get_num_threads())
    return (out,)
