"""Reference rule of `ops.Rope`."""

import torch


def rule(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, heads: int | None) -> tuple[torch.Tensor]:
    """Pairs (a, b) at the end of each head become a cos - b sin in its first half, b cos + a sin in its second."""
    if heads is not None:
        x = x.reshape(len(x), heads, x.shape[1] // heads)
        cos, sin = cos[:, None], sin[:, None]
    start = x.shape[-1] - 2 * cos.shape[-1]
    a, b = x[..., start::2], x[..., start + 1 :: 2]
    return (torch.cat([a * cos - b * sin, b * cos + a * sin], -1),)
