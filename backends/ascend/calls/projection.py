"""A matrix for each head: npu_transpose_batchmatmul where it takes the sizes, two transposes round a bmm where not.

    out[t, n, f] = sum_k x[t, n, k] * weight[n, k, f]

The operator reads and writes tokens first, so that nothing is transposed in
memory.  It wants 1 <= N * K < 65536 (127 heads x 512 fit, 128 do not), N and F
below 65536, and K and F multiples of 16.  Source: op-plugin, `npu_transpose_batchmatmul`.
"""

import torch

_LIMIT = 65536


def fits(heads: int, inner: int, features: int) -> bool:
    """Whether the operator takes `heads` matrices [inner, features].

    >>> [fits(heads, 512, 128) for heads in (16, 127, 128)]
    [True, True, False]
    """
    return (
        inner % 16 == 0 and features % 16 == 0 and features < _LIMIT and heads < _LIMIT and 1 <= heads * inner < _LIMIT
    )


def per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [T, N, K], `weight` [N, K, F] -> [T, N, F], contiguous."""
    heads, inner, features = weight.shape
    if not x.shape[0]:
        return x.new_empty((0, heads, features))
    if fits(heads, inner, features):
        out: torch.Tensor = torch.ops.npu.npu_transpose_batchmatmul(x, weight, perm_x1=(1, 0, 2), perm_y=(1, 0, 2))
        return out
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()
