"""CUDA rule of `ops.RopeAngles`: float64 on the device, since a float32 angle at position 100000 is off by 0.004."""

from collections.abc import Sequence
from functools import cache

import torch

from mla_fx.dtypes import wide


@cache
def table(frequencies: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The frequencies on a device in float64.  Made once; the copy blocks, so any stream may read it from then on."""
    return torch.tensor(frequencies, dtype=torch.float64).to(device)


def rule(
    positions: torch.Tensor, like: torch.Tensor, *, frequencies: Sequence[float], magnitude: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of float64 angles, then rounded."""
    dtype = wide(like.dtype)
    angles = torch.outer(positions.to(torch.float64), table(tuple(frequencies), positions.device))
    return angles.cos().mul_(magnitude).to(dtype), angles.sin().mul_(magnitude).to(dtype)
