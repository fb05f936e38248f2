"""Graphs for the stand-in of a device: torch's calls on the host's tensors, replayed into the same memory.

As on a device, capturing runs nothing: what was there before is as it was, and what the graph makes is garbage until a
replay; no number can be read. `Updating` has, as an NPU, task groups, external events and updates; a replay stops at
an event that has not been recorded, and goes on when it is.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import define, field
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.backends.standin import Module, Stream

_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")


class WaitError(RuntimeError):
    """The host would wait for the device, or the device for good."""


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _garbage(tensor: torch.Tensor) -> None:
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    raw.fill_(0xAB if not tensor.is_floating_point() else 0xFF)  # all bits set is NaN


class Recording(TorchDispatchMode):
    """Writes down calls, and undoes what they did once it ends."""

    def __init__(self, into: list[Any]) -> None:
        super().__init__()
        self.into = into
        self.made: dict[int, torch.Tensor] = {}
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled around it, so torch's compiler need not be loaded to be kept out."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in _READS:
            raise WaitError(f"{func} while a graph is captured")
        for number, argument in enumerate(func._schema.arguments):
            given = kwargs.get(argument.name, args[number] if number < len(args) else None)
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(given):
                    self.keep(tensor)
        out = func(*args, **kwargs)
        known = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        new = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and _storage(x) not in known]
        self.made.update((_storage(x), x) for x in new if x.numel())
        # A replay is many calls: which results have memory of their own is found out once.
        results = [x if isinstance(x, torch.Tensor) and x.numel() else None for x in _results(out)]
        own = [None if x is None or _storage(x) in known else x for x in results]
        self.into.append((func, args, kwargs, own))
        return out

    def keep(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage not in self.made and storage not in self.before:
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self.before[storage] = (raw, raw.clone())

    def undo(self) -> None:
        for raw, bits in self.before.values():
            raw.copy_(bits)
        for tensor in self.made.values():
            _garbage(tensor)


def _results(out: Any) -> Sequence[Any]:
    return out if isinstance(out, tuple | list) else (out,)


def _told(call: Any) -> tuple[Any, list[int]]:
    """A recorded call and the memory that it is on, without numbers."""
    func, args, kwargs, _ = call
    return func, [_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]


def again(call: Any) -> None:
    """A recorded call, its results where they were."""
    func, args, kwargs, into = call
    for old, new in zip(into, _results(func(*args, **kwargs)), strict=True):
        if old is not None:
            old.copy_(new)


@define(eq=False)
class Graph:
    """Calls, groups of them, and external events, in order."""

    module: "Graphs"
    calls: list[Any] = field(factory=list)
    recording: Recording | None = None
    stream: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert self.module.capturing is None and not self.calls and pool is not None
        self.module.log.append(("capture",))
        self.module.capturing, self.stream = self, self.module.current
        self.recording = Recording(self.calls)
        self.recording.__enter__()

    def capture_end(self) -> None:
        assert self.recording is not None
        self.recording.__exit__(None, None, None)
        self.recording.undo()
        self.module.capturing = None
        if self.module.current is not self.stream:
            raise WaitError("a capture ends on another stream than it began on")

    def replay(self) -> None:
        self.module.log.append(("replay",))
        if self.module.running is not None:
            raise WaitError(f"the replay before waits for an event that nobody records: {self.module.waiting}")
        self.module.running = self.run()
        self.module.go_on()

    def run(self) -> Iterator[Any]:
        for call in self.calls:
            match call:
                case ExternalEvent():
                    yield call
                    call.recorded = False
                case list():
                    for one in call:
                        again(one)
                case _:
                    again(call)


@define(eq=False)
class Graphs(Module):
    """A module with graphs that update nothing, as torch.cuda."""

    capturing: Graph | None = None
    running: Iterator[Any] | None = None
    waiting: Any = None
    pools: Any = field(factory=lambda: itertools.count(1))

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    def graph_pool_handle(self) -> int:
        return next(self.pools)

    def empty_cache(self) -> None:
        assert self.capturing is None

    def synchronize(self) -> None:
        if self.capturing is not None:
            raise WaitError("a synchronise while a graph is captured")
        super().synchronize()

    def go_on(self) -> None:
        """Run the replay up to the next event that is not there."""
        while self.running is not None and (self.waiting is None or self.waiting.recorded):
            try:
                self.waiting = next(self.running)
            except StopIteration:
                self.running = self.waiting = None


@define(eq=False)
class ExternalEvent:
    module: "Updating" = field(repr=False)
    recorded: bool = False

    def wait(self, stream: Stream) -> None:
        assert self.module.capturing is not None
        self.module.capturing.calls.append(self)

    def reset(self, stream: Stream) -> None:
        assert self.module.capturing is not None and self.module.capturing.calls[-1] is self

    def record(self, stream: Stream) -> None:
        self.module.log.append(("external", stream))
        self.recorded = True
        self.module.go_on()


@define(eq=False)
class Updating(Graphs):
    """A module whose graphs' task groups can be updated, as torch.npu."""

    CUDAGraph: Any = None
    updating: Recording | None = None
    group: list[Any] = field(factory=list)

    def NPUGraph(self) -> Graph:
        return Graph(self)

    def ExternalEvent(self) -> ExternalEvent:
        return ExternalEvent(self)

    def graph_task_group_begin(self, stream: Stream) -> None:
        assert self.capturing is not None and self.capturing.recording is not None and stream is self.current
        self.capturing.recording.into = []

    def graph_task_group_end(self, stream: Stream) -> list[Any]:
        assert self.capturing is not None and self.capturing.recording is not None
        group = self.capturing.recording.into
        self.capturing.calls.append(group)
        self.capturing.recording.into = self.capturing.calls
        return group

    def graph_task_update_begin(self, stream: Stream, handle: list[Any]) -> None:
        assert self.updating is None and stream is self.current
        self.log.append(("update",))
        self.updating, self.group = Recording([]), handle
        self.updating.__enter__()

    def graph_task_update_end(self, stream: Stream) -> None:
        assert self.updating is not None
        self.updating.__exit__(None, None, None)
        self.updating.undo()
        before, now = (list(map(_told, calls)) for calls in (self.group, self.updating.into))
        assert before == now, "an update must be of the same calls on the same memory"
        self.group[:] = self.updating.into
        self.updating = None
