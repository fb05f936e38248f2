"""Both halves of `ops.AllGather`."""

from collections.abc import Sequence

import torch

from mla_fx.backends.device import Run
from mla_fx.effects import Group


def send(x: torch.Tensor, *, run: Run, features: int, group: Group) -> torch.Tensor:
    """This rank's features."""
    return x.contiguous()


def receive(moved: torch.Tensor, x: torch.Tensor, *, run: Run, features: int, group: Group) -> tuple[torch.Tensor]:
    """Rank after rank comes [T, F]; then features go beside tokens, without the padding of the last ranks."""
    ranks, tokens, own = moved.shape
    return (moved.transpose(0, 1).reshape(tokens, ranks * own)[:, :features].contiguous(),)


def together(x: Sequence[torch.Tensor], *, features: int, group: Group) -> tuple[torch.Tensor]:
    """All features, once for all ranks."""
    return (torch.cat(list(x), 1)[:, :features].contiguous(),)
