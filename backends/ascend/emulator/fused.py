"""Emulated fused operators beside attention: transposing matmul, norm, cache write; each with its refusals."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator.operator import TILING_REFUSED, Operator, require

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check_transpose_matmul(
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
    """Permutations, and K * B below 65536 where x comes as [M, B, K]."""
    require(bias is None, "bias is not supported")
    require(scale is None and split == 1, "scale and batch_split_factor are not emulated")
    require(perm_x1 in ([0, 1, 2], [1, 0, 2]), f"perm_x1 must be (0, 1, 2) or (1, 0, 2): got {perm_x1}")
    require(perm_x2 == [0, 1, 2], f"perm_x2 must be (0, 1, 2): got {perm_x2}")
    require(perm_y == [1, 0, 2], f"perm_y must be (1, 0, 2): got {perm_y}")
    require(x.dtype in _FLOATS and weight.dtype == x.dtype, f"dtypes must be equal: got {x.dtype}, {weight.dtype}")
    batch, inner, features = weight.shape
    require(inner % 16 == 0 and features % 16 == 0, f"K and N must be multiples of 16: got {inner} and {features}")
    require(max(inner, features) < 65536, f"K and N must be below 65536: got {inner} and {features}")
    if perm_x1 == [1, 0, 2]:
        require(
            batch * inner < 65536, f"K * B must be below 65536: got {inner} * {batch} = {batch * inner}", TILING_REFUSED
        )


def run_transpose_matmul(x: torch.Tensor, weight: torch.Tensor, bias: Any, scale: Any, *rest: Any) -> None:
    """A product a batch entry, added up in float32, written as [M, B, N]."""
    perm_x1, perm_x2, perm_y, _, _, out = rest
    out.copy_(torch.matmul(x.permute(perm_x1).float(), weight.permute(perm_x2).float()).permute(perm_y))


def check_rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float, y: torch.Tensor, rstd: torch.Tensor) -> None:
    """Gamma has the dtype of x, or float32; its shape ends that of x."""
    require(x.dtype in _FLOATS, f"x must be float16, bfloat16 or float32: got {x.dtype}")
    require(gamma.dtype in (x.dtype, torch.float32), f"gamma must be {x.dtype} or float32: got {gamma.dtype}")
    ends = list(x.shape[x.dim() - gamma.dim() :])
    require(ends == list(gamma.shape), f"gamma must be {ends}: got {list(gamma.shape)}")


def run_rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float, y: torch.Tensor, rstd: torch.Tensor) -> None:
    """In float32, rounded once."""
    axes = list(range(x.dim() - gamma.dim(), x.dim()))
    root = torch.rsqrt(x.float().square().mean(axes, keepdim=True) + epsilon)
    y.copy_(x.float() * root * gamma.float())
    rstd.copy_(root.view(rstd.shape))


def check_scatter_cache(
    key: torch.Tensor,
    key_cache: torch.Tensor,
    slots: torch.Tensor,
    value: torch.Tensor,
    value_cache: torch.Tensor,
    *rest: Any,
) -> None:
    """ND caches, everything contiguous, one dtype."""
    compress_lens, compress_offsets, seq_lens, mode = rest[:4]
    require(mode in (None, "Norm"), f"cache_mode: only Norm is emulated: got {mode}")
    require(compress_lens is compress_offsets is seq_lens is None, "compression is not emulated")
    require(slots.dtype in (torch.int32, torch.int64) and slots.dim() == 1, "slot_mapping must be int32 or int64 [T]")
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        require(rows.dim() == 3, f"{name} must be [T, heads, D]: got {list(rows.shape)}")
        require(rows.shape[0] == slots.shape[0], f"{name} must have {slots.shape[0]} rows: got {rows.shape[0]}")
        require(rows.is_contiguous() and cache.is_contiguous(), f"{name} and {name}_cache must be contiguous")
        require(rows.dtype == cache.dtype == key.dtype, f"{name} and {name}_cache must be {key.dtype}")
        wanted = [*cache.shape[:2], *rows.shape[1:]]
        require(list(cache.shape) == wanted, f"{name}_cache must be {wanted}: got {list(cache.shape)}")


def run_scatter_cache(
    key: torch.Tensor,
    key_cache: torch.Tensor,
    slots: torch.Tensor,
    value: torch.Tensor,
    value_cache: torch.Tensor,
    *rest: Any,
) -> None:
    """Write the rows whose slot is not negative (the kernels skip those; the documents do not allow them)."""
    size = key_cache.shape[1]
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot // size, slot % size] = key[row]
            value_cache[slot // size, slot % size] = value[row]


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "aclnnTransposeBatchMatMul": Operator("T T T T I I I i8 i32 O", run_transpose_matmul, check_transpose_matmul),
        "aclnnRmsNorm": Operator("T T d O O", run_rms_norm, check_rms_norm),
        "aclnnScatterPaKvCache": Operator("T T T T T T T T s s I I", run_scatter_cache, check_scatter_cache),
    }
)
