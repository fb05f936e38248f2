"""Ascend rule of `ops.Rope`: npu_interleave_rope, or npu_rotary_mul in float32 between two casts.

The first takes angles in the dtype of `x`, 16 bits, and 64 features; it does
all in one launch.  The second wants one dtype, so beside wide angles `x` is
widened, and de-interleaved in the same copy.  Both compute in float32.
"""

from typing import Final

import torch

from mla_fx.backends.common import rope
from mla_fx.backends.device import Run

_FEATURES = 64  # of npu_interleave_rope
_LIMIT, _HEADS = 896, 1000  # of npu_rotary_mul: both below
#: The same in words.
MOST: Final = f"fewer than {_HEADS} heads of fewer than {_LIMIT} features"


def rule(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, run: Run, heads: int | None) -> tuple[torch.Tensor]:
    """Rotate in float32, de-interleaving on the way; one rounding to the dtype of `x`."""
    tokens, features = cos.shape
    count = heads or 1
    shape = (tokens, features) if heads is None else (tokens, heads, features)
    if not tokens or not fits(count, features):
        return rope.rule(x, cos, sin, run=run, heads=heads)
    if cos.dtype == sin.dtype == x.dtype != torch.float32 and features == _FEATURES:
        angles = [part.contiguous().view(tokens, 1, 1, features) for part in (cos, sin)]
        pairs = _pairs(x, count, features).contiguous().unsqueeze(2)
        out: torch.Tensor = torch.ops.npu.npu_interleave_rope(pairs, *angles)
        return (out.view(shape),)
    wide = x.new_empty((tokens, count, features), dtype=torch.float32)
    widen(x, wide)
    return (turned(wide, cos, sin).view(shape).to(x.dtype),)


def fits(heads: int, features: int) -> bool:
    """Whether npu_rotary_mul takes so many heads, of so many features."""
    return features < _LIMIT and heads < _HEADS


def widen(x: torch.Tensor, wide: torch.Tensor) -> None:
    """The last R features of every head of `x` [T, N * D] into `wide` [T, N, R] float32, pairs de-interleaved."""
    tokens, heads, features = wide.shape
    pairs = _pairs(x, heads, features).view(tokens, heads, features // 2, 2)
    wide.view(tokens, heads, 2, features // 2).copy_(pairs.transpose(-1, -2))


def turned(wide: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`wide` [T, N, R] float32, the halves of each head rotated by `cos` and `sin` [T, R]."""
    angles = [part.to(torch.float32).contiguous().view(1, len(part), 1, part.shape[1]) for part in (cos, sin)]
    found: torch.Tensor = torch.ops.npu.npu_rotary_mul(wide.unsqueeze(0), *angles)
    return found[0]


def _pairs(x: torch.Tensor, heads: int, features: int) -> torch.Tensor:
    return x.reshape(len(x), heads, x.shape[1] // heads)[..., -features:]
