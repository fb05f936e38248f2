"""Ascend rule of `ops.QuantLinear`: npu_dynamic_quant and npu_quant_matmul; for float32, plain torch.

The second operator reads a transposed weight where it lies, adds integers up
exactly, and scales by token and by feature in float32.  The first rounds to
the nearest step; what it does with an exact half its page does not say.
"""

import torch

from mla_fx.backends.ascend.calls.quantised import quantise, takes, total
from mla_fx.effects import InputError

_LIMIT = 65536


def rule(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor]:
    """Steps for every token, integer sums, one rounding to the dtype of `x`."""
    features, inner = weight.shape
    if not takes(x):
        q, step = quantise(x)
        return (total(q, weight) * step.unsqueeze(1) * scale,)
    for name, size in (("D", inner), ("F", features)):
        if not 1 <= size < _LIMIT:
            raise InputError(f"{name}: an 8-bit projection on ascend needs 1 to {_LIMIT - 1} features: got {size}")
    if not x.shape[0]:
        return (x.new_empty((0, features)),)
    q, step = torch.ops.npu.npu_dynamic_quant(x)
    scales = {"scale": scale.contiguous(), "pertoken_scale": step}
    return (torch.ops.npu.npu_quant_matmul(q, weight.contiguous().t(), **scales, output_dtype=x.dtype),)
