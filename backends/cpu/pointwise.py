"""Rules in one call of the compiled library (`kernel/pointwise.cpp`), where it is there and takes the operands.

Each `takes` what the library takes; the plain rule beside it serves the rest.
"""

import torch

from mla_fx.backends.cpu import kernel


def takes(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether there is a library, `x` has a dtype of its own and features side by side; others lie as they are read."""
    return (
        x.dtype in kernel.FORMATS
        and x.stride(-1) == 1
        and kernel.engine() is not None
        and all([other.is_contiguous() for other in others])
    )
