"""What an emulated operator is: a signature, what it refuses, and what it computes on host memory.

Device memory is host memory, so an operator is plain torch on CPU tensors
that lie where the device's do.  A signature has a word for each argument, in
the order in which the wheel passes them:

    T  tensor, or None          O  tensor that is only written
    L  list of tensors          W  list of tensors that are only written
    D  tensor that is only written and whose shape the operator decides, up to the shape that is passed
    I  list of integers, or None
    S  number, or None          s  text, or None
    i8 i32 i64  integer         d f  double, float        b  bool

An operator begins and ends in two moves, and others may move in between.  When
it begins, what it only writes becomes NaN; an operator with scratch puts its
operands there, and has nothing else to read when it ends.
"""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from attrs import frozen

#: `aclnn` status codes, as the wheel reports them.
NULL_ARGUMENT, INVALID_ARGUMENT, TILING_REFUSED = 161001, 161002, 561002
#: The runtime's, for an update of an operator of a graph that it does not take.
NOT_UPDATABLE = 207019
#: What most operators that compute take.
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class RefusedError(Exception):
    """What the real operator does not take; reaches the caller as the wheel's RuntimeError with this message."""

    def __init__(self, message: str, status: int = INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.status = status


def require(holds: bool, message: str, status: int = INVALID_ARGUMENT) -> None:
    """Raise `RefusedError` unless `holds`."""
    if not holds:
        raise RefusedError(message, status)


def tiling(holds: bool, message: str) -> None:
    """Raise `RefusedError` as an operator's tiling does, unless `holds`."""
    require(holds, message, TILING_REFUSED)


def _nothing(*arguments: Any) -> None:
    pass


def _no_scratch(*arguments: Any) -> int:
    return 0


def contiguous(position: int, tensor: torch.Tensor) -> bool:
    """For `Operator.lies`: most operators take contiguous tensors."""
    return tensor.is_contiguous()


def any_strides(position: int, tensor: torch.Tensor) -> bool:
    """For `Operator.lies`: operators that copy."""
    return True


def or_transposed(position: int, tensor: torch.Tensor) -> bool:
    """For `Operator.lies`: matrix products, which also take matrices whose last two axes are swapped."""
    return tensor.is_contiguous() or (tensor.dim() > 1 and tensor.transpose(-1, -2).is_contiguous())


@frozen(slots=False)
class Operator:
    """An operator: `run(*arguments)`, and before it `check(*arguments)`, which may raise `RefusedError`.

    `scratch(*arguments)` is the bytes of workspace it asks for.  Where that is
    not 0, `begin` and `run` get the workspace, a uint8 tensor, as first argument.
    `most(*arguments)` is what it says when asked for the most of it
    (GetMaxWorkspaceSize): for any lengths over the same shapes; None: as `scratch`.
    `lies(position, tensor)` says whether an argument is taken as it lies; the
    real call makes the others contiguous first, in a kernel each (and results
    behind), which a trace counts (`Traced.kernels`).
    `fractal`: it takes tensors in FRACTAL_NZ, which others refuse (`emulator.fractal`).
    """

    signature: str
    run: Callable[..., Any]
    check: Callable[..., None] = _nothing
    scratch: Callable[..., int] = _no_scratch
    begin: Callable[..., None] = _nothing
    most: Callable[..., int] | None = None
    lies: Callable[[int, torch.Tensor], bool] = contiguous
    fractal: bool = False

    @cached_property
    def kinds(self) -> list[str]:
        """The signature's words."""
        return self.signature.split()


def poison(written: list[torch.Tensor], read: list[torch.Tensor]) -> None:
    """Spoil what is only written, except where it is an operand too."""
    taken = [ends(tensor) for tensor in read if tensor.numel()]
    for tensor in written:
        if tensor.numel():
            begin, end = ends(tensor)
            if not any(first < end and begin < last for first, last in taken):
                spoil(tensor)


def spoil(tensor: torch.Tensor) -> None:
    """Make it NaN (integers: the largest)."""
    if tensor.dtype != torch.bool:
        tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


class Sized:
    """A result of word D: `put` writes it and says how large it became."""

    def __init__(self, room: torch.Tensor, said: Callable[[list[int]], None]) -> None:
        self.room, self._said = room, said

    def put(self, found: torch.Tensor) -> None:
        """Write `found` to the front of the room, as the contiguous tensor that it will be."""
        self.room.view(-1)[: found.numel()] = found.reshape(-1)
        self._said(list(found.shape))


def ends(tensor: torch.Tensor) -> tuple[int, int]:
    """The address range of an operator's tensor, whose storage ends with it; gaps between rows count as touched."""
    storage = tensor.untyped_storage()
    return tensor.data_ptr(), storage.data_ptr() + storage.nbytes()
