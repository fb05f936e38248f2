"""A device of this process, owned once: streams, events, workspaces and constants by name, lent to all programs.

Streams are handles from a small pool of the device module's, so there is one
set for all: a program's main is the stream that is current when it is called,
its other streams are the device's of that name, whatever the program, and the
same for all ranks that this process runs.  Events are by name too: a program
records an event before it waits for it, and the host issues one program after
the other, which is why one thread at a time may be in here.

The host is a device without streams: one thread runs in issue order, which is
a legal order.
"""

import os
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from importlib import import_module
from typing import Any, Final, Protocol

import torch
from attrs import Factory, define, field, frozen

from mla_fx.effects import MAIN, InputError


@define(eq=False)
class Scratch:
    """Memory that the operators of one rank share, each only while it runs; programs keep them in order.

    One block for all programs, as large as the largest of them asks for.  Where a program needs more than those before
    it, its first step waits for the device, since an operator that still runs may be using what was outgrown.  A block
    that a captured program uses is its for good: what needs more than that gets one beside it.
    """

    device: "Device"
    memory: torch.Tensor | None = None
    known: set[Hashable] = field(factory=set)
    captured: bool = False
    beside: "Scratch | None" = None

    def room(self, need: Hashable, size: Callable[[], int]) -> torch.Tensor:
        """Memory for an operator; `size` says how many bytes it needs at most, asked once for every `need`."""
        if self.beside is not None and need in self.beside.known:
            return self.beside.room(need, size)
        if need not in self.known or self.memory is None:
            count = size()
            if self.memory is None or count > self.memory.nbytes:
                if self.captured:
                    self.beside = self.beside or Scratch(self.device)
                    return self.beside.room(need, lambda: count)
                self._grow(count)
            self.known.add(need)
        self.captured = self.captured or self.device.recorder is not None
        assert self.memory is not None
        return self.memory

    def _grow(self, count: int) -> None:
        if self.device.recorder is not None:
            raise InputError(f"workspace: must not grow while a program is captured: got a need of {count} bytes")
        if self.memory is not None and self.device.has_streams:
            self.device.module.synchronize()
        self.memory = None  # before the larger one is made
        self.memory = torch.empty(count, dtype=torch.uint8, device=self.device.kind)


class Recorder(Protocol):
    """What a launch with integers on the host is told to while a program is captured."""

    def issue(self, call: "Issued", tensors: Sequence[torch.Tensor], host: tuple[tuple[int, ...], ...]) -> None:
        """See `Device.issue`."""


#: `call(tensors, host)`: an operator on tensors that are there, its results among them, with integers of the host.
Issued = Callable[[Sequence[torch.Tensor], tuple[tuple[int, ...], ...]], None]


@frozen(eq=False)
class Pool:
    """The memory of all captured programs of a device; it ends with the last of them, which hold it."""

    handle: Any


@define(eq=False)
class Device:
    """`kind` is the type of torch device that tensors are on, as in "npu".

    `module` is the device's: `torch.npu`, or any that has the same streams and events; None for one without.
    """

    kind: str
    module: Any = field(default=None, repr=False)
    streams: dict[str, Any] = field(factory=dict, repr=False)
    events: dict[str, Any] = field(factory=dict, repr=False)
    scratch: dict[tuple[int, str], Scratch] = field(factory=dict, repr=False)
    constants: dict[Hashable, torch.Tensor] = field(factory=dict, repr=False)
    issuing: Any = field(factory=threading.Lock, repr=False)
    caller: Any = field(default=None, init=False, repr=False)  # the stream that the last program had as its main
    recorder: Recorder | None = field(default=None, init=False, repr=False)  # of the program that is being captured
    pool: Callable[[], "Pool | None"] = field(default=lambda: None, init=False, repr=False)  # a weak reference

    @property
    def has_streams(self) -> bool:
        """Whether work is queued, so that order and lifetimes are for a program to say."""
        return self.module is not None

    def stream(self, name: str) -> Any:
        """The stream of this name; main is whichever is current."""
        if name == MAIN:
            return self.module.current_stream()
        if name not in self.streams:
            made = self.module.Stream()
            for other, stream in self.streams.items():
                if _handle(made) == _handle(stream):
                    raise InputError(
                        f"streams: {name} must have a stream of the device of its own: got the one of {other}; the "
                        f"device's pool goes round, and {len(self.streams)} of it are taken, so use fewer names"
                    )
            self.streams[name] = made
        return self.streams[name]

    def event(self, name: str) -> Any:
        """The event of this name."""
        if name not in self.events:
            self.events[name] = self.module.Event()
        return self.events[name]

    def rooms(self, names: Collection[str]) -> dict[str, int]:
        """Bytes of the block of each of these workspaces, where there is one, not of what was put beside it."""
        held = {name: one.memory.nbytes for (_, name), one in self.scratch.items() if one.memory is not None}
        return {name: size for name, size in held.items() if name in names}

    def shared_pool(self) -> Pool:
        """The pool of what is captured now: that of the others, while there are any."""
        pool = self.pool()
        if pool is None:
            pool = Pool(self.module.graph_pool_handle())
            self.pool = weakref.ref(pool)
        return pool

    def issue(self, call: Issued, tensors: Sequence[torch.Tensor], host: tuple[tuple[int, ...], ...]) -> None:
        """Call an operator that takes integers of the host, all that its op has, in the op's order.

        In a program that is captured the call is one that every replay updates, with integers of its own over the same
        tensors: so it may depend on these integers in no other way, and launches nothing else.
        """
        if self.recorder is None:
            call(tensors, host)
        else:
            self.recorder.issue(call, tensors, host)

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory that does not keep it: where a graph has that, its launches need no more."""
        if self.kind != "npu":
            return tensor
        made: torch.Tensor = import_module("torch_npu")._C._weak_ref_tensor(tensor)
        return made

    def constant(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor that never changes, made on the host by `make` when it is first asked for, and copied here.

        The copy blocks, so that any stream may read it from then on.
        """
        if key not in self.constants:
            self.constants[key] = make().to(self.kind)
        return self.constants[key]

    def pinned(self, size: int) -> torch.Tensor:
        """Bytes on the host that the device can fetch by itself."""
        made = torch.empty(size, dtype=torch.uint8)
        return made if self.kind == "cpu" else made.pin_memory()

    def enter(self, others: tuple[Any, ...]) -> Any:
        """Start issuing a program whose streams beside main are `others`; returns the caller's stream, its main.

        Raises `InputError` where another thread is issuing, or where the caller's stream is one of `others`.
        """
        if not self.issuing.acquire(blocking=False):
            raise InputError(f"a program on {self.kind} must be called by one thread at a time: got a second one")
        try:
            caller = self.module.current_stream()
            if _handle(caller) in map(_handle, others):
                raise InputError(
                    "the caller's stream must not be a stream of the program beside main: got one that is; the "
                    "device's pool has given one stream out twice, so call from another"
                )
            if self.caller is None:
                self.caller = caller
            elif _handle(caller) != _handle(self.caller):
                # The order between programs is that of main; one that comes on another stream is behind the last.
                caller.wait_stream(self.caller)
                self.caller = caller
        except BaseException:
            self.issuing.release()
            raise
        return caller

    def leave(self, caller: Any) -> None:
        """The program has been issued; the caller's stream is current again."""
        self.module.set_stream(caller)
        self.issuing.release()

    def __reduce__(self) -> Any:
        raise TypeError(f"a device belongs to its process and cannot be pickled or copied: got {self.kind}")


def _handle(stream: Any) -> Any:
    """What tells two streams of the device apart."""
    for name in ("npu_stream", "cuda_stream", "stream_id"):
        if hasattr(stream, name):
            return getattr(stream, name)
    return id(stream)


_OWNED: Final[dict[str, Device]] = {}


#: What keeps all devices but some out of a process's sight.
_IN_SIGHT: Final = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}


def device(kind: str) -> Device:
    """The device of this kind that the process has.

    It becomes the current one when it is first asked for: number LOCAL_RANK, as torchrun numbers the processes of a
    machine, or, where there is no LOCAL_RANK, the one that is current.  Raises `InputError` where there is none of
    that number.
    """
    if kind not in _OWNED:
        module = None if kind == "cpu" else torch.get_device_module(kind)
        if module is not None:
            take_own(kind, module)
        _OWNED[kind] = Device(kind, module)
    return _OWNED[kind]


def take_own(kind: str, module: Any) -> None:
    """Make the process's own device of a kind the current one; see `device`."""
    told = os.environ.get("LOCAL_RANK")
    if told is None:
        return
    if not told.isdecimal():
        raise InputError(f"LOCAL_RANK: must be the number of a process on its machine, from 0: got {told!r}")
    rank, count = int(told), module.device_count()
    if count == 1 and os.environ.get(_IN_SIGHT.get(kind, "")):
        return  # whoever started it has given it its own
    if rank >= count:
        raise InputError(f"LOCAL_RANK: must be below the number of {kind} devices in sight, {count}: got {rank}")
    module.set_device(rank)


#: The host.
HOST: Final = device("cpu")


@frozen(eq=False)
class Run:
    """Where a rule runs: its rank in the group of the op, and what the device holds for it.

    `number` is that of the rank in the world, whose workspaces these are; so is `rank` for an op without a group.
    """

    rank: int = 0
    device: Device = HOST
    number: int = field(default=Factory(lambda self: self.rank, takes_self=True))

    def scratch(self, name: str) -> Scratch:
        """The workspace of this rank that an op `uses`."""
        return self.device.scratch.setdefault((self.number, name), Scratch(self.device))

    def constant(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor that never changes: see `Device.constant`."""
        return self.device.constant(key, make)
