"""Ascend rule of `ops.QuantLinear`: npu_dynamic_quant and npu_quant_matmul; for float32, plain torch.

The second operator reads a transposed weight where it lies, adds integers up
exactly, and scales by token and by feature in float32.  The first rounds to
the nearest step; what it does with an exact half its page does not say.
"""

import torch

from mla_fx.backends.ascend.calls.dtypes import wrong_dtype
from mla_fx.backends.ascend.calls.fractal import matrix, plain
from mla_fx.backends.ascend.calls.quantised import quantise, total
from mla_fx.backends.device import Run
from mla_fx.effects import Aval, ops

_LIMIT = 65536


def takes(op: ops.QuantLinear, x: Aval, weight: Aval, scale: Aval) -> str | None:
    """Features that the operators take; float32 is for plain torch."""
    if (why := wrong_dtype("x", x)) or x.dtype == "fp32":
        return why
    for name, size in zip("FD", weight.shape, strict=True):
        if not 1 <= size < _LIMIT:
            return f"{name}: an 8-bit projection on ascend needs 1 to {_LIMIT - 1} features: got {size}"
    return None


def rule(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Steps for every token, integer sums, one rounding to the dtype of `x`."""
    features = weight.shape[0]
    if x.dtype == torch.float32:
        q, step = quantise(x)
        return (total(q, plain(weight)) * step.unsqueeze(1) * scale,)
    if not x.shape[0]:
        return (x.new_empty((0, features)),)
    q, step = torch.ops.npu.npu_dynamic_quant(x)
    scales = {"scale": scale.contiguous(), "pertoken_scale": step}
    return (torch.ops.npu.npu_quant_matmul(q, matrix(weight), **scales, output_dtype=x.dtype),)
