"""Reference rule of `ops.QuantLinear`."""

import torch

from mla_fx.backends.device import Run


def rule(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """out[t, f] = s[t] * scale[f] * sum_d q[t, d] * weight[f, d], q the tokens in steps of s = max |x| / 127."""
    s = x.abs().amax(1, keepdim=True) / 127 if x.shape[1] else x.new_zeros(len(x), 1)
    q = torch.where(s == 0, 0, torch.round(x / s))
    return ((s * scale * torch.einsum("td,fd->tf", q, weight.to(q.dtype))).contiguous(),)
