"""Emulated operators that work row by row: norm, activation, cache write; each with its refusals."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator.operator import FLOATS, Operator, require, tiling

_CACHED = (torch.float16, torch.bfloat16, torch.int8)


def check_rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float, y: torch.Tensor, rstd: torch.Tensor) -> None:
    """Gamma has the dtype of x, or float32; its shape ends that of x."""
    require(x.dtype in FLOATS, f"x must be float16, bfloat16 or float32: got {x.dtype}")
    require(gamma.dtype in (x.dtype, torch.float32), f"gamma must be {x.dtype} or float32: got {gamma.dtype}")
    ends = list(x.shape[x.dim() - gamma.dim() :])
    require(ends == list(gamma.shape), f"gamma must be {ends}: got {list(gamma.shape)}")


def run_rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float, y: torch.Tensor, rstd: torch.Tensor) -> None:
    """In float32, rounded once."""
    axes = list(range(x.dim() - gamma.dim(), x.dim()))
    root = torch.rsqrt(x.float().square().mean(axes, keepdim=True) + epsilon)
    y.copy_(x.float() * root * gamma.float())
    rstd.copy_(root.view(rstd.shape))


def check_swiglu(x: torch.Tensor, axis: int, out: torch.Tensor) -> None:
    """Contiguous, not empty, an even axis."""
    require(x.dtype in FLOATS, f"x must be float16, bfloat16 or float32: got {x.dtype}")
    require(x.numel() > 0, "x must not be empty")
    require(x.is_contiguous(), f"x must be contiguous: got strides {x.stride()}")
    require(x.shape[axis] % 2 == 0, f"axis {axis} of x must be even: got {x.shape[axis]}")


def run_swiglu(x: torch.Tensor, axis: int, out: torch.Tensor) -> None:
    """In float32, rounded once."""
    gate, up = x.float().chunk(2, axis)
    out.copy_(gate / (1 + torch.exp(-gate)) * up)


def check_scatter_cache(
    key: torch.Tensor,
    key_cache: torch.Tensor,
    slots: torch.Tensor,
    value: torch.Tensor,
    value_cache: torch.Tensor,
    *rest: Any,
) -> None:
    """ND caches, 8 and 16 bits, no fewer rows in the cache than there are slots, of which those of -1 count too."""
    compress_lens, compress_offsets, seq_lens, mode = rest[:4]
    require(mode in (None, "Norm"), f"cache_mode: only Norm is emulated: got {mode}")
    require(compress_lens is compress_offsets is seq_lens is None, "compression is not emulated")
    require(slots.dtype in (torch.int32, torch.int64), f"slot_mapping must be int32 or int64: got {slots.dtype}")
    tiling(slots.dim() == 1, f"slot_mapping must have 1 axis: got {slots.dim()}")
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        tiling(rows.dim() == 3, f"{name} must be [T, heads, D]: got {list(rows.shape)}")
        tiling(cache.dim() == 4, f"{name}_cache must be [blocks, block_size, heads, D]: got {list(cache.shape)}")
        tiling(rows.shape[0] == slots.shape[0], f"{name} must have {slots.shape[0]} rows: got {rows.shape[0]}")
        require(rows.is_contiguous() and cache.is_contiguous(), f"{name} and {name}_cache must be contiguous")
        tiling(rows.dtype in _CACHED, f"{name} must be float16, bfloat16 or int8: got {rows.dtype}")
        tiling(cache.dtype == rows.dtype, f"{name}_cache must be {rows.dtype}: got {cache.dtype}")
        wanted = [*key_cache.shape[:2], *rows.shape[1:]]
        tiling(list(cache.shape) == wanted, f"{name}_cache must be {wanted}: got {list(cache.shape)}")
    tiling(key.shape[1] == value.shape[1], f"value must have {key.shape[1]} heads: got {value.shape[1]}")
    wide = key.dtype != torch.int8
    tiling(not (wide and value.dtype == torch.int8), f"value must not be int8 beside {key.dtype}")
    room = key_cache.shape[0] * key_cache.shape[1]
    tiling(room >= slots.shape[0], f"key_cache must have at least T = {slots.shape[0]} rows: got {room}")


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
        if slot >= size * key_cache.shape[0]:
            raise IndexError(f"slot_mapping: must be below {size * key_cache.shape[0]}: got {slot}")
        if slot >= 0:
            key_cache[slot // size, slot % size] = key[row]
            value_cache[slot // size, slot % size] = value[row]


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "aclnnRmsNorm": Operator("T T d O O", run_rms_norm, check_rms_norm),
        "aclnnSwiGlu": Operator("T i64 O", run_swiglu, check_swiglu),
        "aclnnScatterPaKvCache": Operator("T T T T T T T T s s I I", run_scatter_cache, check_scatter_cache),
    }
)
