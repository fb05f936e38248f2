"""Reference rule of `ops.RopeAngles`."""

from collections.abc import Sequence

import torch


def rule(
    positions: torch.Tensor, like: torch.Tensor, *, frequencies: Sequence[float], magnitude: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos[t, i] = m * cos(position[t] * f[i]), sin[t, i] = m * sin(position[t] * f[i])."""
    angles = torch.outer(positions.to(torch.float64), torch.tensor(frequencies, dtype=torch.float64))
    return magnitude * torch.cos(angles), magnitude * torch.sin(angles)
