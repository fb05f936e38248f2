"""Reference rule of `ops.UnpermuteTokens`."""

import torch

from mla_fx.backends.device import Run


def rule(rows: torch.Tensor, source: torch.Tensor, weights: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """out[t] = sum_u weights[t, u] * rows[source[t, u]] over the u with source[t, u] >= 0."""
    out = rows.new_zeros(len(source), rows.shape[1])
    for t, (sources, of_token) in enumerate(zip(source.tolist(), weights, strict=True)):
        for u, g in enumerate(sources):
            if g >= 0:
                out[t] += of_token[u] * rows[g]
    return (out,)
