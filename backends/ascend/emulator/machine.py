"""The emulated device in this process: loaded libraries, operators as callbacks, seeds and traces.

Decided here: how arguments of an operator are read, and what a trace says.
What the device does with tasks is `runtime.cpp`; what operators compute is `operators`.
"""

import ctypes
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field, frozen

from mla_fx.backends.ascend.emulator.build import LIBRARIES, entry_points
from mla_fx.backends.ascend.emulator.operator import NULL_ARGUMENT, Operator, RefusedError, poison

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
_KINDS = ("operator", "record", "wait", "to_device", "to_host", "on_device", "fill", "collective")
#: As `hccl.cpp` numbers them; and its dtypes.
_COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v"),
    *("broadcast", "send", "barrier"),
)
_SENT = (
    *(torch.int8, torch.int16, torch.int32, torch.float16, torch.float32, torch.int64),
    *(torch.uint64, torch.uint8, torch.uint16, torch.uint32, torch.float64, torch.bfloat16),
)
_Pointer = ctypes.c_void_p
_Absent = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
_Run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int, _Pointer, ctypes.c_uint64)


@frozen
class Traced:
    """Something that ran on the device.

    `kind` is operator, record, wait, to_device, to_host, on_device (a copy by
    the runtime), fill or collective (of a group of processes); `stream` and
    `event` are the handles that `torch.npu.Stream.npu_stream` and
    `torch.npu.Event.npu_event` show.  `name` is an operator's, as CANN knows
    it, or a collective's; `operands` and `results` are the dtypes and shapes of
    an operator's tensors, of a collective what this rank sends.  `bytes_` is
    what a copy moved, the size of an operator's tensors, or what a rank sends.
    """

    kind: str
    stream: int
    event: int = 0
    name: str = ""
    operands: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()
    results: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()
    bytes_: int = 0

    @property
    def casts(self) -> bool:
        """Whether an operator that only moves data changes its floating dtype."""
        moves = self.name in ("aclnnCast", "aclnnInplaceCopy")
        return moves and self.operands[-1][0].is_floating_point and self.operands[-1][0] != self.results[0][0]


class _Entry(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("kind", "stream", "subject", "bytes")]


class _Tensor(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("axes", "dtype", "offset")),
        ("memory", _Pointer),
        ("shape", ctypes.c_int64 * 8),
        ("strides", ctypes.c_int64 * 8),
    ]


def _tensor(address: int | None) -> torch.Tensor | None:
    """A CPU tensor in the memory of a device tensor; without memory (sizes are being asked for) a meta tensor."""
    if not address:
        return None
    found = _Tensor.from_address(address)
    dtype, shape, strides = _DTYPES[found.dtype], found.shape[: found.axes], found.strides[: found.axes]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    if not found.memory:
        return torch.empty(shape, dtype=dtype, device="meta")
    span = found.offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    raw = (ctypes.c_char * (span * dtype.itemsize)).from_address(found.memory)
    return torch.frombuffer(raw, dtype=dtype).as_strided(shape, strides, found.offset)


def _integers(address: int | None) -> list[int] | None:
    if not address:
        return None
    words = ctypes.cast(address, ctypes.POINTER(ctypes.c_int64))
    return [words[1 + index] for index in range(words[0])]


def _tensors(address: int | None) -> list[torch.Tensor | None]:
    return [_tensor(item) for item in _integers(address) or ()]


def _number(address: int) -> Any:
    dtype = _DTYPES[ctypes.c_int64.from_address(address).value]
    return torch.frombuffer(bytearray(ctypes.string_at(address + 8, 8)), dtype=dtype)[0].item()


def _text(value: bytes | None) -> str | None:
    return value.decode() if value is not None else None


#: Word of a signature -> how C passes it, and how it is read.
_ARGUMENTS: Final[Mapping[str, tuple[Any, Callable[[Any], Any]]]] = {
    "T": (_Pointer, _tensor),
    "O": (_Pointer, _tensor),
    "L": (_Pointer, _tensors),
    "W": (_Pointer, _tensors),
    "I": (_Pointer, _integers),
    "S": (_Pointer, _number),
    "s": (ctypes.c_char_p, _text),
    "i8": (ctypes.c_int8, int),
    "i32": (ctypes.c_int32, int),
    "i64": (ctypes.c_int64, int),
    "d": (ctypes.c_double, float),
    "b": (ctypes.c_bool, bool),
}


@frozen(eq=False, repr=False)
class _Call:
    """An operator on its way: planned, perhaps launched."""

    name: str
    operator: Operator
    arguments: list[Any]

    def tensors(self, *, written: bool) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for kind, value in zip(self.operator.kinds, self.arguments, strict=True):
            if (kind in ("O", "W")) is written and kind in ("T", "O", "L", "W"):
                found += [t for t in (value if kind in ("L", "W") else [value]) if t is not None]
        return found


@define(eq=False, repr=False)
class Machine:
    """The emulated device; `emulate` makes the one of this process."""

    folder: Path
    operators: Mapping[str, Operator]
    _runtime: ctypes.CDLL = field(init=False)
    _pending: dict[int, _Call] = field(factory=dict, init=False)
    _traced: dict[int, _Call] | None = field(default=None, init=False)
    _thrown_away: int = field(default=0, init=False)  # this call and all before it
    _numbers: Iterator[int] = field(factory=lambda: itertools.count(1), init=False)
    _callbacks: list[Any] = field(factory=list, init=False)
    _entries: list[str] = field(factory=list, init=False)
    _message: bytes = field(default=b"", init=False)  # C keeps a copy; this is for readers

    def __attrs_post_init__(self) -> None:
        libraries = [ctypes.CDLL(str(self.folder / f"{name}.so"), mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES]
        self._runtime, entries = libraries[:2]
        self._runtime.emulator_trace_length.restype = ctypes.c_int64
        self._runtime.emulator_trace_entries.restype = _Pointer
        self._runtime.emulator_seed.argtypes = [ctypes.c_uint64]
        self._entries = entry_points(self.folder)
        run, absent = _Run(self._run), _Absent(self._absent)
        self._callbacks += [run, absent]
        entries.emulator_python(run, absent)
        slots = (_Pointer * len(self._entries)).in_dll(entries, "operator_slots")
        launch, nowhere = (
            ctypes.cast(getattr(entries, name), _Pointer).value for name in ("emulator_launch", "absent_operator")
        )
        for index, entry in enumerate(self._entries):
            name = entry.removesuffix("GetWorkspaceSize").removesuffix("GetMaxWorkspaceSize")
            if name not in self.operators:
                slots[index] = nowhere
            elif entry == name:
                slots[index] = launch
            else:
                plan = self._planner(name, self.operators[name], launched=entry.endswith("GetWorkspaceSize"))
                self._callbacks.append(plan)
                slots[index] = ctypes.cast(plan, _Pointer).value

    def seed(self, seed: int) -> None:
        """From here on, streams are interleaved by `seed`.

        What was issued before runs first, and memory that the wheel's allocator
        holds in reserve is given back: what it hands out next is NaN, not what a run before left there.
        """
        self.synchronize()
        torch.get_device_module("npu").empty_cache()
        self._runtime.emulator_seed(seed)

    def synchronize(self) -> None:
        """Run everything that was issued; raises the wheel's RuntimeError for a fault on the device."""
        torch.get_device_module("npu").synchronize()

    def recover(self) -> None:
        """After a fault, make the device usable again; tasks that were waiting are thrown away."""
        if self._runtime.emulator_recover():
            self._thrown_away = next(self._numbers)
            self._pending.clear()

    @contextmanager
    def tracing(self) -> Iterator[list[Traced]]:
        """A list that, after the block, has what ran on the device for it, in the order in which it ran."""
        self.synchronize()
        found: list[Traced] = []
        self._traced = {}
        self._runtime.emulator_trace(1)
        try:
            yield found
            self.synchronize()
            length = self._runtime.emulator_trace_length()
            entries = (_Entry * length).from_address(self._runtime.emulator_trace_entries()) if length else ()
            found += [self._entry(entry) for entry in entries]
        finally:
            self._traced = None
            self._runtime.emulator_trace(0)

    def ran(self) -> int:
        """How many tasks the trace that is being made has so far."""
        length: int = self._runtime.emulator_trace_length()
        return length

    def _entry(self, entry: Any) -> Traced:
        kind = _KINDS[entry.kind]
        if kind == "collective":
            name, dtype = _COLLECTIVES[entry.subject % 256], _SENT[entry.subject // 256]
            sent = ((dtype, (entry.bytes // dtype.itemsize,)),)
            return Traced(kind, entry.stream, name=name, operands=sent, bytes_=entry.bytes)
        if kind != "operator":
            return Traced(kind, entry.stream, event=entry.subject, bytes_=entry.bytes)
        call = (self._traced or {})[entry.subject]
        operands, results = call.tensors(written=False), call.tensors(written=True)
        return Traced(
            kind,
            entry.stream,
            name=call.name,
            operands=tuple((t.dtype, tuple(t.shape)) for t in operands),
            results=tuple((t.dtype, tuple(t.shape)) for t in results),
            bytes_=sum(t.numel() * t.element_size() for t in operands + results),
        )

    # --- called from C ---------------------------------------------------------

    def _planner(self, name: str, operator: Operator, *, launched: bool) -> Any:
        """The function behind GetWorkspaceSize, or (not launched) GetMaxWorkspaceSize."""
        passed = [_ARGUMENTS[kind] for kind in operator.kinds]
        size, executor = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(_Pointer)
        kind: Any = ctypes.CFUNCTYPE(ctypes.c_int, *(ctype for ctype, _ in passed), size, executor)

        def plan(*raw: Any) -> int:
            try:
                arguments = [read(value) for (_, read), value in zip(passed, raw[:-2], strict=True)]
                operator.check(*arguments)
                raw[-2][0] = operator.scratch(*arguments)
                raw[-1][0] = number = next(self._numbers)
                if launched:
                    self._pending[number] = _Call(name, operator, arguments)
                return 0
            except RefusedError as error:
                return self._say(f"{name}: {error}", error.status)
            except Exception:
                return self._say(f"{name}: {traceback.format_exc()}", NULL_ARGUMENT)

        return kind(plan)

    def _run(self, number: int, phase: int, workspace: int | None, size: int) -> int:
        """An operator begins (phase 0) or ends (phase 1)."""
        if number <= self._thrown_away:
            return 0  # the host queue still had it
        try:
            call = self._pending[number] if phase == 0 else self._pending.pop(number)
            arguments = call.arguments
            if workspace and call.operator.scratch(*arguments):
                raw = (ctypes.c_char * size).from_address(workspace)
                arguments = [torch.frombuffer(raw, dtype=torch.uint8), *arguments]
            if phase == 0:
                if self._traced is not None:
                    self._traced[number] = call
                poison(call.tensors(written=True), call.tensors(written=False))
                call.operator.begin(*arguments)
            else:
                call.operator.run(*arguments)
            return 0
        except Exception:
            return self._say(traceback.format_exc(), 1)

    def _absent(self, index: int) -> int:
        return self._say(f"{self._entries[index]} is not in the emulator's table of operators", NULL_ARGUMENT)

    def _say(self, message: str, status: int) -> int:
        self._message = message.encode()
        self._runtime.emulator_message(self._message)
        return status
