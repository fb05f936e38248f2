"""Rule of `ops.LocalHeads`, and which heads are a rank's own."""

import torch

from mla_fx.backends.device import Run
from mla_fx.effects import Group


def rule(q: torch.Tensor, *, run: Run, group: Group) -> tuple[torch.Tensor]:
    """q_local[t, n] = q[t, rank * N + n], copied."""
    own = own_heads(q, q.shape[1] // group.size, 1, run)
    return (own.clone(memory_format=torch.contiguous_format),)


def own_heads(part: torch.Tensor, heads: int, axis: int, run: Run) -> torch.Tensor:
    """The rank's own `heads` of those on an axis: all that are there, or its share of a group's."""
    return part if part.shape[axis] == heads else part.narrow(axis, run.rank * heads, heads)
