"""Weights in 8 bits: the FP8 blocks that DeepSeek publishes, and the int8 channels of W8A8.

FP8 (e4m3) has a float32 factor for each block of 128 x 128, those at the edges
partial; `weight_scale_inv` is a factor in spite of its name:

    w[r, c] = float32(w8[r, c]) * weight_scale_inv[r // 128, c // 128]

Int8 has a float32 step for each output feature:

    w[f, d] = scale[f] * w8[f, d]        scale[f] = max_d |w[f, d]| / 127,  w8 rounded to even

Sources: DeepSeek-V3 (arXiv 2412.19437, section 3.3, and its published
checkpoints); W8A8 dynamic as in vLLM-Ascend.
"""

import torch

from mla_fx.models.config import FP8_BLOCK
from mla_fx.parameters import Quantized

#: The largest e4m3 number.
FP8_MAX = 448.0


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the factors of an FP8 weight; blocks at the edges are partial.

    >>> scale_shape((576, 7168))
    (5, 56)
    """
    return tuple(-(-size // FP8_BLOCK) for size in shape)


def dequantize_fp8(
    weight: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype, row: int = 0, column: int = 0
) -> torch.Tensor:
    """Part of an FP8 weight, [r, c] from `row` and `column` on, with the factors of the whole -> [r, c] in `dtype`.

    The product is in float32 and rounded once.
    """
    wide = weight.to(torch.float32)
    factors = scale[(row + torch.arange(weight.shape[0])) // FP8_BLOCK]
    first = 0
    while first < weight.shape[1]:  # one column of blocks after the other: the factors are not spread out
        block = (column + first) // FP8_BLOCK
        last = min((block + 1) * FP8_BLOCK - column, weight.shape[1])
        wide[:, first:last] *= factors[:, block : block + 1]
        first = last
    return wide.to(dtype)


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [F, D] as FP8 and its factors, the largest of a block becoming 448."""
    rows, columns = scale_shape(tuple(weight.shape))
    padded = torch.zeros(rows * FP8_BLOCK, columns * FP8_BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scale = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    small = (blocks / scale[:, None, :, None]).view_as(padded)[: weight.shape[0], : weight.shape[1]]
    return small.to(torch.float8_e4m3fn).contiguous(), scale


def quantize_int8(weight: torch.Tensor) -> Quantized[torch.Tensor]:
    """A weight [..., F, D] in int8 with a float32 step for each output feature; a row of zeros has step 0."""
    wide = weight.to(torch.float32)
    scale = wide.abs().amax(-1) / 127
    step = torch.where(scale == 0, 1, scale).unsqueeze(-1)
    # The step of a row of subnormal numbers is rounded so coarsely that 127 of it may not reach the largest.
    return Quantized((wide / step).round_().clamp_(-127, 127).to(torch.int8), scale)


def dequantize_int8(weight: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """An int8 weight [F, D] and its steps [F] -> [F, D] in `dtype`; the product is in float32 and rounded once."""
    return weight.to(torch.float32).mul_(scale.to(torch.float32).unsqueeze(-1)).to(dtype)
