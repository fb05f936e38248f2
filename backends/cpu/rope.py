"""CPU rule of `ops.Rope`."""

import torch

from mla_fx.backends.common import rope
from mla_fx.backends.cpu.kernel import FORMATS, function
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.device import Run


def rule(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, run: Run, heads: int | None) -> tuple[torch.Tensor]:
    """Rotate in float32 (float64 beside float64), de-interleaving on the way; one rounding to the dtype of `x`."""
    if not (cos.dtype == torch.float32 and takes(x, cos, sin)):
        return rope.rule(x, cos, sin, run=run, heads=heads)
    rows, features, count = len(x), cos.shape[1], heads or 1
    out = x.new_empty(rows, features) if heads is None else x.new_empty(rows, heads, features)
    rotate = function("mla_fx_rope", "ipllpppllli")
    strides = x.stride(0), x.shape[1] // count
    at = x.data_ptr(), *strides, cos.data_ptr(), sin.data_ptr(), out.data_ptr()
    rotate(FORMATS[x.dtype], *at, rows, count, features, torch.get_num_threads())
    return (out,)
