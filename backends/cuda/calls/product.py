"""Matrix products that add up in float32 (float64 beside float64) and round once.

A product of 16-bit matrices may add up parts of the sum in 16 bits, which
torch allows cuBLAS by default (`allow_bf16_reduced_precision_reduction`).
Asked for a float32 result it cannot; the rounding is then ours.  That is for
CUDA only: torch's CPU has no such overload, and adds up in float32 anyway.
Between float32 matrices torch uses TF32 only where its user turned it on.
"""

import torch

from mla_fx.dtypes import wide


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x` @ `y` of two matrices, or of two batches of them, in their dtype."""
    if widens(x):
        return wide_product(x, y).to(x.dtype)
    return torch.matmul(x, y)


def wide_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same, left in the wide dtype."""
    if widens(x):
        multiply = torch.mm if x.dim() == 2 else torch.bmm
        return multiply(x, y, out_dtype=torch.float32)
    return torch.matmul(x.to(wide(x.dtype)), y.to(wide(x.dtype)))


def per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A matrix for each head: `x` [T, N, K], `weight` [N, K, F] -> [T, N, F], contiguous."""
    return product(x.transpose(0, 1), weight).transpose(0, 1).contiguous()


def widens(x: torch.Tensor) -> bool:
    """Whether torch can be asked for a float32 product of `x`."""
    return x.is_cuda and x.dtype.itemsize == 2
