"""Emulated npu_moe_finalize_routing: the experts' rows back at their tokens, weighted and added up.

    out[t] = x1[t] + x2[t] + sum_k scales[t, k] * rows[index[t, k]]

`drop_pad_mode` 2 has an index for each pair, row by row, and rows [T K, H]; 3
has rows [E, C, H] of experts of capacity C, and -1 for a pair that was dropped,
whose row is not read.  0 and 1 are the same column by column.
The wheel calls the fourth version where there is one; for what is taken here it is the second.
Source: aclnnMoeFinalizeRoutingV4 and moe_finalize_routing_v2_tiling_membase.cpp of ops-transformer.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator.operator import FLOATS, Operator, require, tiling


def check(
    rows: torch.Tensor,
    index: torch.Tensor,
    x1: torch.Tensor | None,
    x2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    experts: torch.Tensor | None,
    *rest: Any,
) -> None:
    """Scales in the dtype of the rows, or float32 beside bfloat16; axes by mode; sums without bias only."""
    require(rows.dtype in FLOATS, f"expanded_x must be float16, bfloat16 or float32: got {rows.dtype}")
    require(index.dtype == torch.int32, f"expanded_row_idx must be int32: got {index.dtype}")
    require(bias is None and experts is None, "bias and expert_idx are not emulated")
    mode, k, out = rest[4], rest[8], rest[9]
    tiling(mode in range(4), f"drop_pad_mode must be in 0..3: got {mode}")
    tiling(index.dim() == 1, f"expanded_row_idx must have 1 axis: got {index.dim()}")
    axes = 3 if mode in (1, 3) else 2
    tiling(rows.dim() == axes, f"expanded_x must have {axes} axes with drop_pad_mode {mode}: got {rows.dim()}")
    top_k = k
    if scales is not None:
        wide = rows.dtype == torch.bfloat16 and scales.dtype == torch.float32
        require(wide or scales.dtype == rows.dtype, f"scales beside {rows.dtype}: got {scales.dtype}")
        tiling(scales.dim() == 2, f"scales must have 2 axes: got {scales.dim()}")
        top_k = scales.shape[1]
        tiling(k in (1, top_k), f"k must be that of scales, {top_k}: got {k}")
    tiling(top_k > 0, "K must not be 0")
    shape = [index.shape[0] // top_k, rows.shape[-1]]
    for name, other in (("x1", x1), ("x2", x2)):
        if other is not None:
            require(other.dtype == rows.dtype, f"{name} must be {rows.dtype}: got {other.dtype}")
            tiling(list(other.shape) == shape, f"{name} must be {shape}: got {list(other.shape)}")
    tiling(x2 is None or x1 is not None, "x2 needs x1")
    tiling(list(out.shape) == shape, f"out must be {shape}: got {list(out.shape)}")


def run(rows: torch.Tensor, index: torch.Tensor, x1: Any, x2: Any, *rest: Any) -> None:
    """In float32, rounded once."""
    scales, mode, out = rest[1], rest[7], rest[12]
    flat = rows.reshape(-1, rows.shape[-1])
    least, numbers = (-1 if mode in (1, 3) else 0), index.long()
    if numbers.numel() and not least <= int(numbers.min()) <= int(numbers.max()) < flat.shape[0]:
        raise IndexError(f"expanded_row_idx: must be in {least}..{flat.shape[0] - 1}: got {index.tolist()}")
    tokens = out.shape[0]
    pairs = numbers.view(tokens, -1) if mode >= 2 else numbers.view(-1, tokens).t()
    total = torch.zeros(out.shape)
    for other in (x1, x2):
        if other is not None:
            total += other.float()
    for k in range(pairs.shape[1]):
        there = pairs[:, k] >= 0
        weight = torch.ones(tokens) if scales is None else scales[:, k].float()
        total[there] += weight[there].unsqueeze(1) * flat[pairs[there, k]].float()
    out.copy_(total)


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {"aclnnMoeFinalizeRoutingV4": Operator("T T T T T T T T T T T i64 I I I i64 O", run, check)}
)
