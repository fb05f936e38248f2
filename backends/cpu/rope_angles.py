"""CPU rule of `ops.RopeAngles`."""

from collections.abc import Sequence

import torch

from mla_fx.dtypes import wide


def rule(
    positions: torch.Tensor, like: torch.Tensor, *, frequencies: Sequence[float], magnitude: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of float64 angles, then rounded: a float32 angle at position 100000 is off by 0.004."""
    dtype = wide(like.dtype)
    angles = torch.outer(positions.to(torch.float64), torch.tensor(frequencies, dtype=torch.float64))
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1:
        cos, sin = cos.mul_(magnitude), sin.mul_(magnitude)
    return cos.to(dtype), sin.to(dtype)
