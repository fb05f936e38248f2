"""CUDA rule of `ops.GatherHeads`, all ranks on one device."""

from collections.abc import Iterator, Sequence

import torch


def rule(
    operands: Sequence[tuple[torch.Tensor, torch.Tensor]], *, ranks: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor] | None]:
    """Each rank copies the heads of all, side by side in rank order."""
    q_latent, q_rope = zip(*operands, strict=True)
    for _ in range(ranks):
        yield torch.cat(q_latent, 1), torch.cat(q_rope, 1)
