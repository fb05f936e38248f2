"""Both halves of `ops.GatherHeads`: one message of L + R features a head."""

from collections.abc import Sequence

import torch

from mla_fx.backends.device import Run
from mla_fx.effects import Group


def send(q_latent: torch.Tensor, q_rope: torch.Tensor, *, run: Run, group: Group) -> torch.Tensor:
    """Both parts of own heads' query, side by side."""
    return torch.cat((q_latent, q_rope), 2)


def receive(
    moved: torch.Tensor, q_latent: torch.Tensor, q_rope: torch.Tensor, *, run: Run, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank after rank comes [T, N, L + R]; then heads go beside tokens."""
    ranks, tokens, own, _ = moved.shape
    latent = q_latent.shape[2]
    heads = moved.transpose(0, 1)  # [T, W, N, L + R]
    parts = (heads[..., :latent], heads[..., latent:])
    q_latent_all, q_rope_all = (part.reshape(tokens, ranks * own, part.shape[3]) for part in parts)
    return q_latent_all.contiguous(), q_rope_all.contiguous()


def together(
    q_latent: Sequence[torch.Tensor], q_rope: Sequence[torch.Tensor], *, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries of all heads, once for all ranks."""
    return torch.cat(list(q_latent), 1), torch.cat(list(q_rope), 1)
