"""A stand-in for the module of a device: it runs every call when it is issued, and writes down what it is asked.

Tensors are the host's, so results are those of the rules, and the log is what a
device would have been told, in the words of the program.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import define, field

from mla_fx.backends import Backend, Device, InProcess, Table

Entry = tuple[Any, ...]


@define(eq=False)
class Stream:
    module: "Module" = field(repr=False)
    stream_id: int

    def wait_event(self, event: "Event") -> None:
        self.module.log.append(("wait", event, self))

    def wait_stream(self, other: "Stream") -> None:
        self.module.log.append(("follow", self, other))


@define(eq=False)
class Event:
    module: "Module" = field(repr=False)

    def record(self, stream: Stream) -> None:
        self.module.log.append(("record", self, stream))

    def synchronize(self) -> None:
        self.module.log.append(("host", self))


@define(eq=False)
class Module:
    """Streams are numbered as they are made, round a pool of `pool`; the caller's is none of it."""

    pool: int = 32
    log: list[Entry] = field(factory=list)
    made: int = 0
    events: int = 0
    current: Any = None

    def Stream(self) -> Stream:
        self.made += 1
        return Stream(self, (self.made - 1) % self.pool)

    def Event(self) -> Event:
        self.events += 1
        return Event(self)

    def current_stream(self) -> Any:
        return self.current

    def set_stream(self, stream: Any) -> None:
        self.current = stream
        self.log.append(("on", stream))

    def synchronize(self) -> None:
        self.log.append(("synchronize",))


class Machine:
    """A device of its own on the stand-in, called from the stream `caller`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Module | None = None) -> None:
        self.module = module or Module()
        self.caller = self.module.current = Stream(self.module, -1)
        self.device = Device("cpu", self.module)
        self.labels: dict[int, str] = {}  # of tensors by id: a log that held them would be their owner
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.kept(tensor, stream))

    def kept(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.module.log.append(("keep", self.labels.get(id(tensor)), stream))

    def backend(self, ranks: int, table: Any, name: str = "toy") -> Backend:
        return Backend(name, table if isinstance(table, Table) else Table(table), InProcess(ranks), self.device)

    def say(self, *entry: Any) -> None:
        self.module.log.append(entry)

    def told(self, call: Callable[[], Any] = lambda: None) -> list[str]:
        """What the device was told by a call, with what it let go of before its results were."""
        self.module.log.clear()
        results = call()
        told = self.told_so_far()
        del results
        return told

    def told_so_far(self) -> list[str]:
        return [self.word(*entry) for entry in self.module.log]

    def word(self, kind: str, *rest: Any) -> str:
        streams = {-1: "caller", **{stream.stream_id: name for name, stream in self.device.streams.items()}}
        events = {event: name for name, event in self.device.events.items()}

        def of(stream: Stream) -> str:
            return streams.get(stream.stream_id, f"stream {stream.stream_id}")

        match kind:
            case "on":
                return f"on {of(rest[0])}"
            case "record":
                return f"{events.get(rest[0], 'sent')} at {of(rest[1])}"
            case "wait":
                return f"{of(rest[1])} waits {events.get(rest[0], 'the replay before')}"
            case "follow":
                return f"{of(rest[0])} follows {of(rest[1])}"
            case "keep":
                return f"keep {rest[0]} for {of(rest[1])}"
            case "host":
                return f"host waits {events.get(rest[0], 'sent')}"
            case "launch":
                return f"{rest[0]} on {of(rest[1])}"
        return " ".join([kind, *map(str, rest)])
