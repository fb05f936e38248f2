"""Rule of `ops.Rope`."""

import torch

from mla_fx.backends.device import Run


def rule(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, run: Run, heads: int | None) -> tuple[torch.Tensor]:
    """Rotate in the dtype of the angles, de-interleaving on the way; one rounding to the dtype of `x`."""
    half = cos.shape[1]
    if heads is not None:
        x = x.reshape(x.shape[0], heads, x.shape[1] // heads)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    pairs = x[..., x.shape[-1] - 2 * half :].to(cos.dtype)
    a, b = pairs[..., 0::2], pairs[..., 1::2]
    return (torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype),)
