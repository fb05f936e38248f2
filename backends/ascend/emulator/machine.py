"""The emulated device in this process: loaded libraries, operators as callbacks, seeds and traces.

Decided here: what happens when the wheel calls an operator, and what a trace says.
What the device does with tasks is `runtime.cpp`, what it captures `capture.cpp`; what operators compute is `operators`.
"""

import atexit
import ctypes
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from attrs import define, field, frozen

from mla_fx.backends.ascend.emulator.arguments import ARGUMENTS, in_memory
from mla_fx.backends.ascend.emulator.build import LIBRARIES, SUFFIXES, entry_points
from mla_fx.backends.ascend.emulator.fractal import Fractal, memory
from mla_fx.backends.ascend.emulator.operator import (
    NOT_UPDATABLE,
    NULL_ARGUMENT,
    Operator,
    RefusedError,
    Sized,
    any_strides,
    poison,
)
from mla_fx.backends.ascend.emulator.releases import Release
from mla_fx.backends.ascend.emulator.stale import Stale
from mla_fx.effects import InputError

_TENSORS = frozenset("TOLWD")  # words of a signature that are tensors, see `emulator.operator`
_KINDS = (
    *("operator", "record", "wait", "to_device", "to_host", "on_device", "fill", "collective", "prefetch"),
    *("value_wait", "value_write", "replay", "update"),
)
#: What an operator is asked, as `device.h` numbers it.
_BEGIN, _END, _REPLAY_BEGIN, _REPLAY_END, _KEEP, _COMPARE, _CHANGE, _FORGET, _BLAME = range(9)
#: And what a graph is told.
_PROTECT, _SPOIL, _GONE = range(9, 12)
#: As `hccl.cpp` numbers them; and its dtypes.
_COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v"),
    *("broadcast", "send", "barrier"),
)
_SENT = (
    *(torch.int8, torch.int16, torch.int32, torch.float16, torch.float32, torch.int64),
    *(torch.uint64, torch.uint8, torch.uint16, torch.uint32, torch.float64, torch.bfloat16),
)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Pointer = ctypes.c_void_p
_Absent = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
_Run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int, _Pointer, ctypes.c_uint64)


@frozen
class Traced:
    """Something that ran on the device.

    `kind` is operator, record, wait, to_device, to_host, on_device (a copy by
    the runtime), fill, collective (of a group of processes), prefetch (a hint, which moves nothing), value_wait and
    value_write (of a word in memory: an external event's wait, reset and record), replay (of a graph, in front of what
    it runs) or update (of an operator of a graph).  `stream` and `event` are the handles that
    `torch.npu.Stream.npu_stream` and `torch.npu.Event.npu_event` show; of what a replay runs, `stream` is the one that
    it was captured on, and `graph` the graph's number, which is 0 for what the host issued (and an update's).  So what
    the host issued is what has no `graph`.
    `name` is an operator's, as CANN knows
    it, or a collective's; `operands` and `results` are the dtypes and shapes of
    an operator's tensors, of a collective what this rank sends.  `bytes_` is
    what a copy moved, the size of an operator's tensors, or what a rank sends.
    `kernels` is how many an operator's call launches, of those that can be
    told from its arguments: its own, and one for each operand that it first
    makes contiguous, and for each result that it copies to where it lies.
    """

    kind: str
    stream: int
    event: int = 0
    name: str = ""
    operands: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()
    results: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()
    bytes_: int = 0
    kernels: int = 1
    graph: int = 0

    @property
    def casts(self) -> bool:
        """Whether an operator that only moves data changes its floating dtype."""
        moves = self.name in ("aclnnCast", "aclnnInplaceCopy")
        return moves and self.operands[-1][0].is_floating_point and self.operands[-1][0] != self.results[0][0]


class _Entry(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("kind", "stream", "subject", "bytes", "graph")]


@frozen(eq=False, repr=False)
class _Call:
    """An operator on its way: planned, perhaps launched."""

    name: str
    operator: Operator
    arguments: list[Any]
    written: list[torch.Tensor] = field(factory=list, init=False)
    read: list[torch.Tensor] = field(factory=list, init=False)
    strided: list[int] = field(factory=list, init=False)  # positions of tensors that do not lie as they should

    def __attrs_post_init__(self) -> None:
        for place, (kind, value) in enumerate(zip(self.operator.kinds, self.arguments, strict=True)):
            if kind in _TENSORS and value is not None:
                for found in value if kind in "LW" else (value,):
                    tensor = found.room if isinstance(found, Sized) else found
                    if isinstance(found, Fractal):
                        tensor = memory(found, self.operator)
                    if tensor is not None:
                        (self.written if kind in "OWD" else self.read).append(tensor)
                        if not self.operator.lies(place, tensor):
                            self.strided.append(place)

    def difference(self, before: "_Call") -> str | None:
        """Why this one cannot take the place of `before` in a graph: all but lists of integers must be the same."""
        if self.name != before.name:
            return f"the operator must be {before.name}"
        for place, (kind, new, old) in enumerate(
            zip(self.operator.kinds, self.arguments, before.arguments, strict=True)
        ):
            if kind != "I" and (found := _said(new)) != (expected := _said(old)):
                return f"argument {place} must be as captured, {expected}: got {found}"
        return None

    @property
    def kernels(self) -> int:
        """See `Traced`.  What is written in place is made contiguous, and copied back."""
        return 1 + len(self.strided) + (self.name.startswith("aclnnInplace") and 0 in self.strided)


def _said(argument: Any) -> str:
    """An argument of an operator; of a tensor all but its content."""
    if isinstance(argument, Sized):
        return _said(argument.room)
    if isinstance(argument, list):
        return f"[{', '.join(_said(item) for item in argument)}]"
    if not isinstance(argument, torch.Tensor):
        return repr(argument)
    return f"{argument.dtype} {tuple(argument.shape)} with strides {argument.stride()} at {argument.data_ptr():#x}"


def _with_scratch(call: _Call, workspace: int | None, size: int) -> list[Any]:
    """What an operator's functions are called with: where it has scratch, its workspace first."""
    need = call.operator.scratch(*call.arguments)
    if need > size:
        raise IndexError(f"workspace: must have {need} bytes: got {size}")
    if not (need and workspace):
        return call.arguments
    raw = (ctypes.c_char * size).from_address(workspace)
    return [torch.frombuffer(raw, dtype=torch.uint8), *call.arguments]


@define(eq=False, repr=False)
class Machine:
    """The emulated device; `emulate` makes the one of this process."""

    folder: Path
    _table: Callable[[Release], Mapping[str, Operator]]
    _release: Release
    _operators: dict[str, Operator] = field(factory=dict, init=False)
    _added: dict[str, Operator] = field(factory=dict, init=False)  # by hand; in every release
    _runtime: ctypes.CDLL = field(init=False)
    _pending: dict[int, _Call] = field(factory=dict, init=False)
    _captured: dict[int, _Call] = field(factory=dict, init=False)  # for as long as their graph has them
    _stale: dict[int, Stale] = field(factory=dict, init=False)  # of graphs
    _traced: dict[int, _Call] | None = field(default=None, init=False)
    _thrown_away: int = field(default=0, init=False)  # this call and all before it
    _numbers: Iterator[int] = field(factory=lambda: itertools.count(1), init=False)
    _callbacks: list[Any] = field(factory=list, init=False)
    _slots: Any = field(init=False)
    _launch: int | None = field(init=False)
    _enqueue: Any = field(init=False)  # the same, for Python
    _entries: dict[str, int] = field(factory=dict, init=False)  # to slots
    _message: bytes = field(default=b"", init=False)  # C keeps a copy; this is for readers

    def __attrs_post_init__(self) -> None:
        libraries = [ctypes.CDLL(str(self.folder / f"{name}.so"), mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES]
        self._runtime, entries = libraries[:2]
        self._runtime.emulator_trace_length.restype = ctypes.c_int64
        self._runtime.emulator_trace_entries.restype = _Pointer
        self._runtime.emulator_seed.argtypes = [ctypes.c_uint64]
        self._runtime.emulator_limits.argtypes = [ctypes.c_int64, ctypes.c_int64]
        atexit.register(self._runtime.emulator_leave)
        self._entries = {name: slot for slot, name in enumerate(entry_points(self.folder))}
        run, absent = _Run(self._run), _Absent(self._absent)
        self._callbacks += [run, absent]
        entries.emulator_python(run, absent)
        self._slots = (_Pointer * len(self._entries)).in_dll(entries, "operator_slots")
        self._launch = ctypes.cast(entries.emulator_launch, _Pointer).value
        self._enqueue = entries.emulator_launch
        self._enqueue.argtypes = [_Pointer, ctypes.c_uint64, ctypes.c_int64, _Pointer]
        self._runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
        nowhere = ctypes.cast(entries.absent_operator, _Pointer).value
        self._slots[:] = [nowhere] * len(self._entries)
        self.play(self._release)

    @property
    def release(self) -> Release:
        """What is played."""
        return self._release

    def play(self, release: Release) -> None:
        """Be a device of this release from here on; what was issued before was planned by the one before."""
        self._release = release
        self._runtime.emulator_cann(*(part.encode() for part in release.version.split(".")))
        for name, operator in {**self._table(release), **self._added}.items():
            self._install(name, operator)

    def operator(self, name: str, signature: str, **how: Any) -> Callable[[_Function], _Function]:
        """Decorate a function that computes an operator of that aclnn name: it is in the table from here on.

        `signature` and `how` (`check`, `scratch`, `begin`, `most`, `lies`) are those of `emulator.operator.Operator`.
        An operator that is there already is replaced.  Raises `InputError` for a name that the wheel does not look up,
        or for an unknown word in the signature.
        """
        if name not in self._entries:
            raise InputError(f"name: must be an operator that the wheel looks up: got {name}")
        for word in signature.split():
            if word not in ARGUMENTS:
                raise InputError(f"signature: must consist of {' '.join(ARGUMENTS)}: got {word}")

        def add(function: _Function) -> _Function:
            self._added[name] = Operator(signature, function, **how)
            self._install(name, self._added[name])
            return function

        return add

    def _install(self, name: str, operator: Operator) -> None:
        """Into the table and, where the signature is new, into the slots."""
        before = self._operators.get(name)
        self._operators[name] = operator
        if before is not None and before.signature == operator.signature:
            return
        for suffix in SUFFIXES:
            slot = self._entries[name + suffix]
            if suffix:
                plan = self._planner(name, operator.kinds, launched=suffix == "GetWorkspaceSize")
                self._callbacks.append(plan)
                self._slots[slot] = ctypes.cast(plan, _Pointer).value
            else:
                self._slots[slot] = self._launch

    def launch(
        self, name: str, function: Callable[..., None], read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        """Launch a kernel of somebody's own on the stream that is current: an operator of that name in a trace.

        `function(*read, *written)` gets CPU tensors in the memory of the device's, strides and all, when its turn has
        come; `written` are NaN until then.  The wheel's queue is emptied before, as the launcher of Triton does it.
        """
        stream = torch.get_device_module("npu").current_stream().npu_stream
        kinds = "T" * len(read) + "O" * len(written)
        operator = Operator(" ".join(kinds), function, lies=any_strides)
        number = next(self._numbers)
        self._pending[number] = _Call(name, operator, [in_memory(tensor) for tensor in (*read, *written)])
        status = self._enqueue(None, 0, number, stream)
        if status:
            raise RuntimeError(f"{name}: {self._runtime.aclGetRecentErrMsg().decode()}")

    def seed(self, seed: int) -> None:
        """From here on, streams are interleaved by `seed`.

        What was issued before runs first, and memory that the wheel's allocator
        holds in reserve is given back: what it hands out next is NaN, not what a run before left there.
        """
        self.synchronize()
        torch.get_device_module("npu").empty_cache()
        self._runtime.emulator_seed(seed)

    def limit(self, *, streams: int = 2048, tasks: int = 2048) -> None:
        """How many streams the graphs of the device can have in all, and how many tasks one of them can.

        A graph takes a stream for each that was captured, and another one where there are more tasks.  What has no room
        is refused as on a device (207008).  Without arguments what it is from the start, about what an A2 has.
        """
        self._runtime.emulator_limits(streams, tasks)

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
            return Traced(kind, entry.stream, name=name, operands=sent, bytes_=entry.bytes, graph=entry.graph)
        if kind not in ("operator", "update"):
            return Traced(kind, entry.stream, event=entry.subject, bytes_=entry.bytes, graph=entry.graph)
        call = (self._traced or {})[entry.subject]
        return Traced(
            kind,
            entry.stream,
            name=call.name,
            operands=tuple((t.dtype, tuple(t.shape)) for t in call.read),
            results=tuple((t.dtype, tuple(t.shape)) for t in call.written),
            bytes_=sum(t.numel() * t.element_size() for t in call.read + call.written),
            kernels=call.kernels,
            graph=entry.graph,
        )

    # --- called from C ---------------------------------------------------------

    def _planner(self, name: str, kinds: list[str], *, launched: bool) -> Any:
        """The function behind GetWorkspaceSize, or (not launched) GetMaxWorkspaceSize."""
        passed = [ARGUMENTS[kind] for kind in kinds]
        size, executor = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(_Pointer)
        kind: Any = ctypes.CFUNCTYPE(ctypes.c_int, *(ctype for ctype, _ in passed), size, executor)

        def plan(*raw: Any) -> int:
            operator = self._operators[name]
            try:
                arguments = [read(value) for (_, read), value in zip(passed, raw[:-2], strict=True)]
                call = _Call(name, operator, arguments)
                operator.check(*arguments)
                asked = operator.scratch if launched or operator.most is None else operator.most
                raw[-2][0] = asked(*arguments)
                raw[-1][0] = number = next(self._numbers)
                if launched:
                    self._pending[number] = call
                return 0
            except RefusedError as error:
                return self._say(f"{name}: {error}", error.status)
            except Exception:
                return self._say(f"{name}: {traceback.format_exc()}", NULL_ARGUMENT)

        return kind(plan)

    @torch.inference_mode()  # or what was issued in it could not be written
    def _run(self, number: int, phase: int, workspace: int | None, size: int) -> int:
        """What the device asks about an operator: see `device.h`."""
        try:
            if phase in (_BEGIN, _END) and number <= self._thrown_away:
                return 0  # the host queue still had it
            if phase in (_BEGIN, _REPLAY_BEGIN):
                self._begin(number, (self._pending if phase == _BEGIN else self._captured)[number], workspace, size)
            elif phase in (_END, _REPLAY_END):
                call = self._pending.pop(number) if phase == _END else self._captured[number]
                call.operator.run(*_with_scratch(call, workspace, size))
            elif phase in (_PROTECT, _SPOIL, _GONE):
                self._replayed(number, phase, workspace or 0, size)
            else:
                return self._of_a_graph(number, phase, workspace or 0)
            return 0
        except Exception:
            return self._say(traceback.format_exc(), 1)

    def _begin(self, number: int, call: _Call, workspace: int | None, size: int) -> None:
        arguments = _with_scratch(call, workspace, size)
        if self._traced is not None:
            self._traced[number] = call
        poison(call.written, call.read)
        call.operator.begin(*arguments)

    def _replayed(self, graph: int, phase: int, begin: int, size: int) -> None:
        """Something that is no operator reads memory in a graph; a replay of it begins; it is no more."""
        if phase == _PROTECT:
            self._stale.setdefault(graph, Stale()).protect(begin, size)
        elif phase == _SPOIL:
            self._stale[graph].spoil()
        else:
            self._stale.pop(graph, None)

    def _of_a_graph(self, number: int, phase: int, other: int) -> int:
        """A graph (`other`) has an operator, gets one in the place of another one (`other`), or has it no more."""
        if phase == _KEEP and number in self._pending:
            call = self._captured[number] = self._pending.pop(number)
            self._stale.setdefault(other, Stale()).runs(call.read, call.written)
        elif phase == _COMPARE:
            call = self._pending[number]
            if (wrong := call.difference(self._captured[other])) is not None:
                return self._say(f"{call.name}: update: {wrong}", NOT_UPDATABLE)
            self._captured[number] = self._pending.pop(number)
        elif phase == _CHANGE and self._traced is not None:
            self._traced[number] = self._captured[number]
        elif phase == _FORGET:
            self._pending.pop(number, None)
            self._captured.pop(number, None)
        elif phase == _BLAME:
            name = self._captured[number].name
            return self._say(
                f"emulated CANN: deadlock: {name} of a graph that is replayed waits for ever: nothing that was issued "
                "records the external event in front of it; was its update forgotten?",
                1,
            )
        return 0

    def _absent(self, index: int) -> int:
        return self._say(f"{list(self._entries)[index]} is not in the emulator's table of operators", NULL_ARGUMENT)

    def _say(self, message: str, status: int) -> int:
        self._message = message.encode()
        self._runtime.emulator_message(self._message)
        return status
