"""Both halves of `ops.AllReduce`: the world adds."""

from collections.abc import Sequence

import torch

from mla_fx.backends.device import Run
from mla_fx.backends.world import added
from mla_fx.effects import Group


def send(x: torch.Tensor, *, run: Run, group: Group) -> torch.Tensor:
    """What this rank adds."""
    return x.contiguous()


def receive(total: torch.Tensor, x: torch.Tensor, *, run: Run, group: Group) -> tuple[torch.Tensor]:
    """The sum over all ranks."""
    return (total,)


def together(x: Sequence[torch.Tensor], *, group: Group) -> tuple[torch.Tensor]:
    """The sum, once for all ranks."""
    return (added(list(x)),)
