"""Rule of `ops.TakeRows`."""

import torch

from mla_fx.backends.device import Run


def rule(x: torch.Tensor, rows: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """out[o] = x[rows[o]]."""
    return (x.index_select(0, rows),)
