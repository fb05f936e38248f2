"""Rule of `ops.Rope`."""

import torch

from mla_fx.backends.device import Run
from mla_fx.dtypes import wide


def rule(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, run: Run, heads: int | None) -> tuple[torch.Tensor]:
    """Rotate wide, de-interleaving on the way; one rounding to the dtype of `x`."""
    kind, features = wide(x.dtype), cos.shape[1]
    if heads is not None:
        x = x.reshape(x.shape[0], heads, x.shape[1] // heads)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    pairs, cos, sin = (part.to(kind) for part in (x[..., x.shape[-1] - features :], cos, sin))
    a, b = pairs[..., 0::2], pairs[..., 1::2]
    (cos_a, cos_b), (sin_a, sin_b) = cos.chunk(2, -1), sin.chunk(2, -1)
    return (torch.cat((a * cos_a - b * sin_a, b * cos_b + a * sin_b), -1).to(x.dtype),)
