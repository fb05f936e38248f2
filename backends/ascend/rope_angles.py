"""Ascend rule of `ops.RopeAngles`: from tables, since a float32 angle at position 100000 is off by 0.004.

A position is p = 2048 high + low, and with a = 2048 high f, b = low f

    cos(p f) = cos a cos b - sin a sin b        sin(p f) = sin a cos b + cos a sin b

whose four factors stand, computed in float64 and rounded once, in two tables
of 2048 rows.  Operators on float64 are few on an NPU, and slow.
"""

import math
from collections.abc import Sequence

import torch

from mla_fx.backends.device import Run
from mla_fx.effects.ops.rope_angles import POSITIONS

#: Rows of a table.  A position behind the last would fault the device, so there is none (`ops.RopeAngles`).
ROWS = math.isqrt(POSITIONS)


def tables(frequencies: Sequence[float], magnitude: float) -> torch.Tensor:
    """[2, 2, ROWS, R] float32: of multiples of 2048 and of 1, cosine and sine; `magnitude` is in the first."""
    turns = torch.outer(torch.arange(ROWS, dtype=torch.float64), torch.tensor([*frequencies] * 2, dtype=torch.float64))
    parts = [torch.stack((angle.cos(), angle.sin())) for angle in (ROWS * turns, turns)]
    return torch.stack((parts[0] * magnitude, parts[1])).to(torch.float32)


def rule(
    positions: torch.Tensor,
    like: torch.Tensor,
    *,
    run: Run,
    frequencies: Sequence[float],
    magnitude: float,
    rounded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of all positions that there are, in float32, at the end rounded or not."""
    key = ("rope tables", tuple(frequencies), magnitude)
    (high_cos, high_sin), (low_cos, low_sin) = run.constant(key, lambda: tables(frequencies, magnitude))
    high = torch.floor_divide(positions, ROWS)
    low = positions - high * ROWS
    a_cos, a_sin = (torch.index_select(part, 0, high) for part in (high_cos, high_sin))
    b_cos, b_sin = (torch.index_select(part, 0, low) for part in (low_cos, low_sin))
    cos, sin = a_cos * b_cos - a_sin * b_sin, a_sin * b_cos + a_cos * b_sin
    return (cos.to(like.dtype), sin.to(like.dtype)) if rounded else (cos, sin)
