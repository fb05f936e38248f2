"""Rule of `ops.LocalHeads`."""

import torch

from mla_fx.backends.device import Run
from mla_fx.effects import Group


def rule(q: torch.Tensor, *, run: Run, group: Group) -> tuple[torch.Tensor]:
    """q_local[t, n] = q[t, rank * N + n], copied."""
    own = q.shape[1] // group.size
    return (q[:, run.rank * own : (run.rank + 1) * own].clone(memory_format=torch.contiguous_format),)
