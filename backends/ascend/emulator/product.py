"""Emulated npu_transpose_batchmatmul: a matrix for each batch entry, rows first in and out.

What the releases take differs much (aclnn_transpose_batch_mat_mul.cpp of ops-nn): see `Release`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from mla_fx.backends.ascend.emulator.operator import FLOATS, Operator, require
from mla_fx.backends.ascend.emulator.releases import Release

_LIMIT = 65536


def check(
    release: Release,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    scale: Any,
    perm_x1: list[int],
    perm_x2: list[int],
    perm_y: list[int],
    cube_math_type: int,
    split: int,
    out: torch.Tensor,
) -> None:
    """Permutations, sizes by release, nothing empty."""
    require(bias is None, "bias is not supported")
    require(scale is None and split == 1, "scale and batch_split_factor are not emulated")
    require(perm_x1 in ([0, 1, 2], [1, 0, 2]), f"perm_x1 must be (0, 1, 2) or (1, 0, 2): got {perm_x1}")
    turned = perm_x2 == [0, 2, 1]
    require(perm_x2 == [0, 1, 2] or turned, f"perm_x2 must be (0, 1, 2) or (0, 2, 1): got {perm_x2}")
    require(perm_y == [1, 0, 2], f"perm_y must be (1, 0, 2): got {perm_y}")
    require(not turned or release.any_batch, f"perm_x2 (0, 2, 1) is not supported before 9.1: got {release.version}")
    require(not turned or perm_x1 == [1, 0, 2], "perm_x1 must be (1, 0, 2) where perm_x2 is (0, 2, 1)")
    require(x.dtype in FLOATS and weight.dtype == x.dtype, f"dtypes must be equal: got {x.dtype}, {weight.dtype}")
    require(x.dim() == weight.dim() == 3, f"x and weight must have 3 axes: got {x.dim()} and {weight.dim()}")
    batch, inner, features = (weight.shape[axis] for axis in perm_x2)
    given = x.shape[perm_x1[2]]
    require(given == inner, f"K must be that of weight, {inner}: got {given}")
    require(x.numel() > 0 and weight.numel() > 0, "x and weight must not be empty")
    size = release.multiple
    fit = inner % size == 0 and features % size == 0
    require(fit, f"K and N must be multiples of {size} in {release.version}: got {inner} and {features}")
    most = max(batch, features)
    require(most < _LIMIT, f"B and N must be below 65536: got {batch} and {features}")
    if perm_x1 == [0, 1, 2]:
        require(inner < _LIMIT, f"K must be below 65536: got {inner}")
    else:
        fit = release.any_batch or batch * inner < _LIMIT
        require(fit, f"K * B must be below 65536 in {release.version}: got {inner} * {batch} = {batch * inner}")


def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, scale: Any, *rest: Any) -> None:
    """A product a batch entry, added up in float32, written as [M, B, N]."""
    perm_x1, perm_x2, perm_y, _, _, out = rest
    out.copy_(torch.matmul(x.permute(perm_x1).float(), weight.permute(perm_x2).float()).permute(perm_y))


def operators(release: Release) -> Mapping[str, Operator]:
    """Name to operator."""
    return {"aclnnTransposeBatchMatMul": Operator("T T T T I I I i8 i32 O", run, partial(check, release))}
