"""Rule of `ops.RopeAngles`: float64 until the end, since a float32 angle at position 100000 is off by 0.004."""

import torch

from mla_fx.backends.device import Run
from mla_fx.dtypes import wide


def rule(
    positions: torch.Tensor,
    like: torch.Tensor,
    *,
    run: Run,
    frequencies: tuple[float, ...],
    magnitude: float,
    rounded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of float64 angles, then rounded."""
    kind = like.dtype if rounded else wide(like.dtype)
    table = run.constant(("rope frequencies", frequencies), lambda: torch.tensor(2 * frequencies, dtype=torch.float64))
    angles = torch.outer(positions.to(torch.float64), table)
    return angles.cos().mul_(magnitude).to(kind), angles.sin().mul_(magnitude).to(kind)
