"""Rules in one call of the compiled library (`kernel/pointwise.cpp`), where it is there and takes the operands.

Each `takes` what the library takes; the plain rule beside it serves the rest.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

from mla_fx.backends.cpu import kernel

#: The library's numbers of activations' dtypes.
FORMATS: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_TYPES: Final = {"i": ctypes.c_int, "l": ctypes.c_int64, "p": ctypes.c_void_p, "f": ctypes.c_float}


def takes(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether there is a library, `x` has a dtype of its own and features side by side; others lie as they are read."""
    return (
        x.dtype in FORMATS
        and x.stride(-1) == 1
        and kernel.engine() is not None
        and all([other.is_contiguous() for other in others])
    )


@cache
def function(name: str, types: str) -> Callable[..., Any]:
    """A function of the library that takes arguments of such types: i and l integers, p memory, f a float."""
    found: Callable[..., Any] = getattr(kernel.library(), name)
    found.argtypes = [_TYPES[one] for one in types]  # type: ignore[attr-defined]
    found.restype = None  # type: ignore[attr-defined]
    return found
