"""How the arguments of an operator are read: C's words for them, and tensors in the memory of the device."""

import ctypes
import math
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator.fractal import FORMAT, Fractal
from mla_fx.backends.ascend.emulator.operator import Sized

_Pointer = ctypes.c_void_p
_DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    9: torch.int64,
    11: torch.float64,
    12: torch.bool,
    27: torch.bfloat16,
}


class _Tensor(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("axes", "dtype", "offset", "span")),
        ("memory", _Pointer),
        ("shape", ctypes.c_int64 * 8),
        ("strides", ctypes.c_int64 * 8),
        ("format", ctypes.c_int64),
        ("stored", ctypes.c_int64 * 8),
    ]


#: The same, read in one go: every operator reads several.
_LAYOUT = struct.Struct("4qQ25q")
#: Memory of any size from an address on; how much of it is a tensor's, `count` says.
_Memory = ctypes.c_char * (1 << 46)


def _tensor(address: int | None) -> Any:
    """A CPU tensor in the memory of a device tensor; without memory (sizes are being asked for) a meta tensor.

    One in FRACTAL_NZ is no tensor, since no strides say how it lies: see `Fractal`.
    """
    if not address:
        return None
    axes, kind, offset, span, memory, *rest = _LAYOUT.unpack(ctypes.string_at(address, _LAYOUT.size))
    dtype, shape, strides = _DTYPES[kind], rest[:axes], rest[8 : 8 + axes]
    if rest[16] == FORMAT and memory:
        stored = rest[17 : 17 + axes + 2]
        whole = torch.frombuffer(_Memory.from_address(memory), dtype=dtype, count=math.prod(stored))
        return Fractal(whole.view(stored), tuple(shape), tuple(strides))
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    if not memory:
        return torch.empty(shape, dtype=dtype, device="meta")
    whole = torch.frombuffer(_Memory.from_address(memory), dtype=dtype, count=span)
    return whole.as_strided(shape, strides, offset)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the device as a CPU tensor in the same memory; the caller sees to it that this stays."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    start, count = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes() // tensor.itemsize
    whole = torch.frombuffer(_Memory.from_address(start), dtype=tensor.dtype, count=count)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _integers(address: int | None) -> list[int] | None:
    if not address:
        return None
    words = ctypes.cast(address, ctypes.POINTER(ctypes.c_int64))
    return words[1 : 1 + words[0]]


def _tensors(address: int | None) -> list[Any]:
    return [_tensor(item) for item in _integers(address) or ()]


def _sized(address: int) -> Sized:
    room = _tensor(address)
    assert room is not None, "a result is never left out"
    return Sized(room, partial(_say_shape, address))


def _say_shape(address: int, shape: list[int]) -> None:
    """Into the descriptor, which the caller keeps: it waits for the device before it looks."""
    found = _Tensor.from_address(address)
    found.axes = len(shape)
    found.shape[: len(shape)] = shape


def _number(address: int | None) -> Any:
    if not address:
        return None
    dtype = _DTYPES[ctypes.c_int64.from_address(address).value]
    return torch.frombuffer(bytearray(ctypes.string_at(address + 8, 8)), dtype=dtype)[0].item()


def _text(value: bytes | None) -> str | None:
    return value.decode() if value is not None else None


#: Word of a signature -> how C passes it, and how it is read.
ARGUMENTS: Final[Mapping[str, tuple[Any, Callable[[Any], Any]]]] = {
    "T": (_Pointer, _tensor),
    "O": (_Pointer, _tensor),
    "L": (_Pointer, _tensors),
    "W": (_Pointer, _tensors),
    "D": (_Pointer, _sized),
    "I": (_Pointer, _integers),
    "S": (_Pointer, _number),
    "s": (ctypes.c_char_p, _text),
    "i8": (ctypes.c_int8, int),
    "i32": (ctypes.c_int32, int),
    "i64": (ctypes.c_int64, int),
    "d": (ctypes.c_double, float),
    "f": (ctypes.c_float, float),
    "b": (ctypes.c_bool, bool),
}
