"""A matrix for each head: npu_transpose_batchmatmul where it takes the sizes, two transposes round a bmm where not.

    out[t, n, f] = sum_k x[t, n, k] * weight[n, k, f]

The operator reads and writes tokens first, so that nothing is transposed in
memory.  It wants N and F below 65536; before CANN 9.1 also N * K below 65536
(127 heads x 512 fit, 128 do not) and K and F multiples of 16, before 9.0 of 128.
Source: aclnn_transpose_batch_mat_mul.cpp of ops-nn 8.5.0, 9.0.0 and 9.1.0.
"""

import torch

from mla_fx.backends.ascend.calls import release

_LIMIT = 65536


def fits(heads: int, inner: int, features: int, cann: tuple[int, int]) -> bool:
    """Whether the operator takes `heads` matrices [inner, features] in that release of CANN.

    >>> [fits(heads, 512, 192, cann) for heads, cann in ((16, (8, 5)), (127, (9, 0)), (128, (9, 0)), (128, (9, 1)))]
    [False, True, False, True]
    """
    if min(heads, inner, features) < 1 or max(heads, features) >= _LIMIT:
        return False
    if cann >= (9, 1):
        return True
    multiple = 16 if cann >= (9, 0) else 128
    return inner % multiple == features % multiple == 0 and heads * inner < _LIMIT


def per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [T, N, K], `weight` [N, K, F] -> [T, N, F], contiguous."""
    heads, inner, features = weight.shape
    if not x.shape[0]:
        return x.new_empty((0, heads, features))
    if fits(heads, inner, features, release.cann()):
        out: torch.Tensor = torch.ops.npu.npu_transpose_batchmatmul(x, weight, perm_x1=(1, 0, 2), perm_y=(1, 0, 2))
        return out
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()
