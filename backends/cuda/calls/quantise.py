"""Rows in steps of their own: dynamic symmetric 8-bit quantisation."""

import torch


def quantise(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers in -127..127 in dtype `kind`, and the step of every row [..., 1], which is its maximum over 127."""
    given = x.to(kind)
    step = given.abs().amax(-1, keepdim=True).div_(127) if x.shape[-1] else given.new_zeros((*x.shape[:-1], 1))
    # A row of zeros has no step: 0 / 0 is NaN, which is taken as 0; a NaN or infinity in x comes back through the step.
    return (given / step).round_().nan_to_num_(0, 0, 0), step
