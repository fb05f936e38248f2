"""Emulated operators that rotate, alone or between a norm and a cache write; each with its refusals.

All compute in float32 and round once, as the kernels do.  Source: the pages and
kernels of rotary_position_embedding, interleave_rope and
kv_rms_norm_rope_cache in ops-transformer, for A2 and A3.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator.operator import FLOATS, Operator, require, tiling

_HALVES = (torch.float16, torch.bfloat16)
_LATENT, _ROPE = 512, 64
#: Which axes of x the angles have, of the first three; they are 1 elsewhere.
_SPREAD = ((1, 1, 0), (1, 0, 1), (0, 1, 1))
_OF_HALF = (*_SPREAD, (0, 1, 0), (0, 0, 1), (0, 0, 0))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x cos + (-second half, first half) sin, in float32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first, second), -1) * cos.float() + torch.cat((-second, first), -1) * sin.float()


def _paired(x: torch.Tensor) -> torch.Tensor:
    """Features 0, 2, .. and behind them 1, 3, .. ."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def check_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int, *rest: Any) -> None:
    """Four axes, fewer than 896 features, an even number; angles broadcast over heads and batch only.

    The wheel brings angles into the dtype of x, in launches of their own, and passes no mode but 0 and 1.
    """
    require(len(rest) == 1 or rest[0] is None, "rotate is not emulated")
    require(x.dtype in FLOATS, f"x must be float16, bfloat16 or float32: got {x.dtype}")
    tiling(x.dim() == cos.dim() == 4, f"x and cos must have 4 axes: got {x.dim()} and {cos.dim()}")
    tiling(cos.shape == sin.shape, f"sin must be {list(cos.shape)}: got {list(sin.shape)}")
    features = x.shape[3]
    fit = features % 2 == 0 and features < 896 and cos.shape[3] == features
    tiling(fit, f"D must be the same everywhere, even and below 896: got {features} and {cos.shape[3]}")
    sizes = [*zip(x.shape[:3], cos.shape[:3], strict=True)]
    tiling(all(turn in (1, size) for size, turn in sizes), f"cos must be 1 or {list(x.shape)}: got {list(cos.shape)}")
    fits = [spread for spread in (_OF_HALF if mode == 0 else _SPREAD) if _is_spread(sizes, spread)]
    tiling(bool(fits), f"cos of this mode must be broadcast over heads: got {list(cos.shape)} for {list(x.shape)}")
    over = [size for size, turn in sizes if turn == 1]
    if mode == 0:
        tiling(all(size < 1000 for size in over), f"B and N must be below 1000: got {list(x.shape)}")
    else:
        product = over[0] * over[1] if len(over) == 2 else max(over, default=1)
        tiling(product < 1000, f"B * N must be below 1000: got {list(x.shape)}")


def _is_spread(sizes: list[tuple[int, int]], spread: tuple[int, ...]) -> bool:
    return all((turn == 1) if over else (turn == size) for (size, turn), over in zip(sizes, spread, strict=True))


def run_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int, *rest: Any) -> None:
    """Mode 0 turns feature i with feature D / 2 + i, mode 1 feature 2 i with 2 i + 1, in place of them."""
    out = rest[-1]
    if mode == 0:
        out.copy_(_turned(x, cos, sin))
        return
    a, b = x.float()[..., ::2], x.float()[..., 1::2]
    out.copy_(x.float() * cos.float() + torch.stack((-b, a), -1).flatten(-2) * sin.float())


def check_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Contiguous, 16 bits, 64 features; angles of one head, of every batch entry."""
    require(x.dtype in _HALVES, f"x must be float16 or bfloat16: got {x.dtype}")
    require(cos.dtype == sin.dtype == x.dtype, f"cos and sin must be {x.dtype}: got {cos.dtype} and {sin.dtype}")
    tiling(x.dim() == 4 and x.shape[3] == _ROPE, f"x must be [B, N, S, {_ROPE}]: got {list(x.shape)}")
    allowed = [[x.shape[0], 1, size, _ROPE] for size in (x.shape[2], 1)]
    for name, angles in (("cos", cos), ("sin", sin)):
        tiling(list(angles.shape) in allowed, f"{name} must be {allowed[0]} or {allowed[1]}: got {list(angles.shape)}")
    require(all(t.is_contiguous() for t in (x, cos, sin)), "x, cos and sin must be contiguous")


def run_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Pairs that lie interleaved leave de-interleaved."""
    out.copy_(_turned(_paired(x), cos, sin))


def check_kv_cache(*arguments: Any) -> None:
    """DeepSeek's sizes, 16 bits, paged caches as [blocks, block_size, 1, D], a slot for each row."""
    kv, gamma, cos, sin, index, k_cache, ckv_cache = arguments[:7]
    require(all(scale is None for scale in arguments[7:11]), "scales and offsets are not emulated")
    mode = arguments[12]
    require(mode in ("PA", "PA_BNSD"), f"cache_mode: only PA and PA_BNSD are emulated: got {mode}")
    require(kv.dtype in _HALVES, f"kv must be float16 or bfloat16: got {kv.dtype}")
    given = {"gamma": gamma, "cos": cos, "sin": sin, "k_cache": k_cache, "ckv_cache": ckv_cache}
    for name, tensor in given.items():
        require(tensor.dtype == kv.dtype, f"{name} must be {kv.dtype}: got {tensor.dtype}")
    require(all(t.is_contiguous() for t in (kv, *given.values())), f"kv, {', '.join(given)} must be contiguous")
    require(index.dtype == torch.int64, f"index must be int64: got {index.dtype}")
    batch, _, rows, _ = kv.shape
    blocks, size = k_cache.shape[:2]
    shapes = {
        "kv": (kv, [batch, 1, rows, _LATENT + _ROPE]),
        "gamma": (gamma, [_LATENT]),
        "cos": (cos, [batch, 1, rows, _ROPE]),
        "sin": (sin, [batch, 1, rows, _ROPE]),
        "index": (index, [batch * rows]),
        "k_cache": (k_cache, [blocks, size, 1, _ROPE]),
        "ckv_cache": (ckv_cache, [blocks, size, 1, _LATENT]),
    }
    for name, (tensor, shape) in shapes.items():
        tiling(list(tensor.shape) == shape, f"{name} must be {shape}: got {list(tensor.shape)}")
    tiling(size * kv.dtype.itemsize % 32 == 0, f"block_size must fill 32 bytes: got {size} of {kv.dtype}")


def run_kv_cache(*arguments: Any) -> None:
    """Normed latent and rotated rope into the caches, and where they are asked for, out; slots below 0 are skipped."""
    kv, gamma, cos, sin, index, k_cache, ckv_cache = arguments[:7]
    epsilon, _, is_output_kv, k_rope, c_kv = arguments[11:]
    latent = kv[..., :_LATENT].float()
    root = torch.rsqrt(latent.square().mean(-1, keepdim=True) + epsilon)
    normed = (latent * root * gamma.float()).to(kv.dtype)
    turned = _turned(_paired(kv[..., _LATENT:]), cos, sin).to(kv.dtype)
    if is_output_kv:
        k_rope.copy_(turned)
        c_kv.copy_(normed)
    size = k_cache.shape[1]
    for row, slot in enumerate(index.tolist()):
        if slot >= size * k_cache.shape[0]:
            raise IndexError(f"index: must be below {size * k_cache.shape[0]}: got {slot}")
        if slot >= 0:
            k_cache[slot // size, slot % size] = turned.view(-1, 1, _ROPE)[row]
            ckv_cache[slot // size, slot % size] = normed.view(-1, 1, _LATENT)[row]


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "aclnnRotaryPositionEmbedding": Operator("T T T i64 O", run_rotary, check_rotary),
        "aclnnRotaryPositionEmbeddingV2": Operator("T T T i64 T O", run_rotary, check_rotary),
        "aclnnInterleaveRope": Operator("T T T O", run_interleave_rope, check_interleave_rope),
        "aclnnKvRmsNormRopeCache": Operator("T T T T T T T T T T T d s b O O", run_kv_cache, check_kv_cache),
    }
)
