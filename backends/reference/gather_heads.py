"""Reference rule of `ops.GatherHeads`."""

from collections.abc import Sequence

import torch


def rule(
    operands: Sequence[tuple[torch.Tensor, torch.Tensor]], *, ranks: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """q_all[t, r * N + n] = q of rank r [t, n], for both parts of the query, on every rank."""
    q_latent, q_rope = zip(*operands, strict=True)
    return [(torch.cat(q_latent, 1), torch.cat(q_rope, 1)) for _ in range(ranks)]
