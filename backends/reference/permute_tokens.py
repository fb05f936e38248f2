"""Reference rule of `ops.PermuteTokens`."""

import torch

from mla_fx.backends.device import Run
from mla_fx.effects import Group


def rule(
    x: torch.Tensor, experts: torch.Tensor, *, run: Run, own: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort this rank's pairs (t, u) by expert, then t, then u."""
    tokens, top_k = experts.shape
    rows = x.new_zeros(tokens * top_k, x.shape[1])
    counts = torch.zeros(own, dtype=torch.int64)
    source = torch.full_like(experts, -1, memory_format=torch.contiguous_format)
    g = 0
    for y in range(own):
        for t in range(tokens):
            for u in range(top_k):
                if experts[t, u] == run.rank * own + y:
                    rows[g], source[t, u] = x[t], g
                    counts[y] += 1
                    g += 1
    return rows, counts, source
