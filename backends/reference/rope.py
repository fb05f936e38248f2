"""Reference rule of `ops.Rope`."""

import torch

from mla_fx.backends.device import Run


def rule(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, run: Run, heads: int | None) -> tuple[torch.Tensor]:
    """out[t, h] = (a cos - b sin, then b cos + a sin), of the pairs (a, b) at the end of each head."""
    if heads is not None:
        x = x.reshape(len(x), heads, x.shape[1] // heads)
        cos, sin = cos[:, None], sin[:, None]
    start = x.shape[-1] - cos.shape[-1]
    a, b = x[..., start::2], x[..., start + 1 :: 2]
    (cos_a, cos_b), (sin_a, sin_b) = cos.chunk(2, -1), sin.chunk(2, -1)
    return (torch.cat([a * cos_a - b * sin_a, b * cos_b + a * sin_b], -1),)
