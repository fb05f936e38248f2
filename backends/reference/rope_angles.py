"""Reference rule of `ops.RopeAngles`."""

import torch

from mla_fx.backends.device import Run


def rule(
    positions: torch.Tensor,
    like: torch.Tensor,
    *,
    run: Run,
    frequencies: tuple[float, ...],
    magnitude: float,
    rounded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos[t, i] = m * cos(position[t] * f[i]), sin[t, i] = m * sin(position[t] * f[i]); nothing is rounded here."""
    angles = torch.outer(positions.to(torch.float64), torch.tensor(2 * frequencies, dtype=torch.float64))
    return magnitude * torch.cos(angles), magnitude * torch.sin(angles)
