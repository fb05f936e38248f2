"""A matrix for each expert and its rows: npu_grouped_matmul, one tensor of rows, one of weights, one of results.

    out[g, f] = sum_d rows[g, d] * weight[y, f, d]        for the counts[y] rows g of expert y

The operator has weights as [Y, D, F] and takes a transposed view, so a stacked
checkpoint weight [Y, F, D] is read where it lies.  Counts are a tensor on the
device (`group_list_type` 1); a single one must come as cumulative (type 0),
which for one is the same number.  Limits: 1024 experts, D and F below 65536.

Its page wants the counts to add up to the rows.  Here they may fall short, as
rows of other ranks' experts are not this rank's to multiply: the operator then
leaves the rest of the results unwritten, and no one may read it.  vllm-ascend
calls it so.  Source: op-plugin, `npu_grouped_matmul`.
"""

from typing import Any

import torch

from mla_fx.effects import Aval

EXPERTS, _LIMIT = 1024, 65536


def takes(weight: Aval) -> str | None:
    """Why the operator cannot take a weight [Y, F, D]."""
    experts, features, inner = weight.shape
    if not 1 <= experts <= EXPERTS:
        return f"experts: a grouped projection on ascend takes 1 to {EXPERTS} a rank: got {experts}"
    for name, size in (("D", inner), ("F", features)):
        if not 1 <= size < _LIMIT:
            return f"{name}: a grouped projection on ascend needs 1 to {_LIMIT - 1} features: got {size}"
    return None


def grouped(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, **how: Any) -> torch.Tensor:
    """`rows` [Z, D], `weight` [Y, F, D], `counts` [Y] -> [Z, F].

    `how` is passed on: scales, those of the weight [Y, F] (the page says one axis, which is for a weight of two), and
    the dtype of the result.
    """
    experts, features, _ = weight.shape
    if not rows.shape[0]:
        return rows.new_empty((0, features), dtype=how.get("output_dtype"))
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [rows.contiguous()],
        [weight.transpose(1, 2)],  # of a weight in FRACTAL_NZ, the matrix as it lies
        group_list=counts.contiguous(),
        split_item=3,
        group_type=0,
        group_list_type=1 if experts > 1 else 0,
        **how,
    )
    result: torch.Tensor = out
    return result
