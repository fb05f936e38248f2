"""Ascend rule of `ops.Rope`: npu_interleave_rope, or npu_rotary_mul in float32 between two casts.

The first takes angles in the dtype of `x`, 16 bits, and 64 features; it does
all in one launch.  The second wants one dtype, so beside wide angles `x` is
widened, and de-interleaved in the same copy.  Both compute in float32.
"""

import torch

from mla_fx.backends.common import rope
from mla_fx.backends.device import Run

_FEATURES = 64  # of npu_interleave_rope
_LIMIT, _HEADS = 896, 1000  # of npu_rotary_mul: both below


def rule(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, run: Run, heads: int | None) -> tuple[torch.Tensor]:
    """Rotate in float32, de-interleaving on the way; one rounding to the dtype of `x`."""
    tokens, features = cos.shape
    count = heads or 1
    shape = (tokens, features) if heads is None else (tokens, heads, features)
    if not tokens or features >= _LIMIT or count >= _HEADS:
        return rope.rule(x, cos, sin, run=run, heads=heads)
    pairs = x.reshape(tokens, count, x.shape[1] // count)[..., -features:]
    if cos.dtype == sin.dtype == x.dtype != torch.float32 and features == _FEATURES:
        angles = [part.contiguous().view(tokens, 1, 1, features) for part in (cos, sin)]
        out: torch.Tensor = torch.ops.npu.npu_interleave_rope(pairs.contiguous().unsqueeze(2), *angles)
        return (out.view(shape),)
    apart = x.new_empty((tokens, count, 2, features // 2), dtype=torch.float32)
    apart.copy_(pairs.view(tokens, count, features // 2, 2).transpose(-1, -2))
    angles = [part.to(torch.float32).contiguous().view(1, tokens, 1, features) for part in (cos, sin)]
    out = torch.ops.npu.npu_rotary_mul(apart.view(1, tokens, count, features), *angles)
    return (out.view(shape).to(x.dtype),)
