"""CPU rule of `ops.QuantLinear`: an integer matrix product between two scalings."""

from collections.abc import Sequence

import torch

from mla_fx.backends.cpu.kernel import Tensors
from mla_fx.backends.cpu.products import in_panels, quantized, unpacked
from mla_fx.backends.device import Run


def several(x: Tensors, weight: Tensors, scale: Tensors, *, runs: Sequence[Run]) -> Sequence[Tensors]:
    """Weights as `products.packed` has them; scaling in the scale's dtype, rounded once to that of `x`."""
    if in_panels(x[0], weight[0]):
        return (quantized(x, weight, scale, None),)
    return ([plain(a, unpacked(b), c) for a, b, c in zip(x, weight, scale, strict=True)],)


def plain(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Steps and scaling in float32 (float64 beside float64), sums in int32, with a weight [F, D] as it is."""
    wide = x.to(scale.dtype)
    step = wide.abs().amax(1, keepdim=True).div_(127) if x.shape[1] else scale.new_zeros(x.shape[0], 1)
    # A row of zeros has no step: 0 / 0 is NaN, which is taken as 0; a NaN or infinity in x comes back through the step.
    q = (wide / step).round_().nan_to_num_(0, 0, 0).to(torch.int8)
    total = torch._int_mm(q, weight.t()).to(scale.dtype)
    return total.mul_(step).mul_(scale).to(x.dtype)
