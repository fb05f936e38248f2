"""Matrix products in 16 bits, on processors that have them and on those that have not.

With AVX-512 bf16 or AMX the library multiplies 16-bit numbers as they are.
Without, it does so number by number: from a few rows on it is faster to widen
a piece of the weights that stays in the cache, multiply in float32 and round
once (3 times at 8 rows of 4096 x 4096, 5 times at 64, on one core with AVX2).
Either way sums are in float32.
"""

from functools import cache

import torch
from torch.nn import functional

#: Numbers of a weight that are widened at a time: 2 MiB in float32.
PIECE = 1 << 19
#: Rows from which on that pays for a weight that is used once a row.
ROWS = 4


@cache
def has(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies numbers of a dtype as they are."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [T, D] times `weight` [F, D] transposed -> [T, F], in the dtype of `x`."""
    if has(x.dtype) or len(x) < ROWS:
        return functional.linear(x, weight)
    out, wide = x.new_empty(len(x), len(weight)), x.float()
    rows = max(1, PIECE // max(1, weight.shape[1]))
    for at in range(0, len(weight), rows):
        out[:, at : at + rows] = functional.linear(wide, weight[at : at + rows].float())
    return out


def batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [N, T, D] times `weight` [N, D, F] -> [N, T, F], in the dtype of `x`."""
    if has(x.dtype):
        return torch.bmm(x, weight)
    out = x.new_empty(*x.shape[:2], weight.shape[2])
    heads = max(1, PIECE // max(1, weight[0].numel()))
    for at in range(0, len(weight), heads):
        some = slice(at, at + heads)
        out[some] = torch.bmm(x[some].float(), weight[some].float())
    return out
