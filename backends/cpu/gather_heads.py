"""CPU rule of `ops.GatherHeads`."""

from collections.abc import Sequence

import torch


def rule(
    operands: Sequence[tuple[torch.Tensor, torch.Tensor]], *, ranks: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Heads side by side in rank order, a copy for every rank."""
    q_latent, q_rope = zip(*operands, strict=True)
    return [(torch.cat(q_latent, 1), torch.cat(q_rope, 1)) for _ in range(ranks)]
