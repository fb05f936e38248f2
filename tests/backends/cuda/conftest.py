"""The CUDA backend on a GPU where there is one, and on a stand-in for `torch.cuda` everywhere.

The stand-in runs every call when it is issued, on tensors of the host, and
keeps a log of the calls.  So results are those of the rules, and the log is
what a GPU would have been told.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from mla_fx import backends
from mla_fx.backends import Backend, cuda, torch_streams
from mla_fx.effects import InputError

Log = list[tuple[Any, ...]]


def why_not() -> str | None:
    """Why nothing can run on a GPU here, None where it can."""
    try:
        cuda.require_gpu()
    except InputError as error:
        return str(error)
    return None


@attrs.define(eq=False)
class Stream:
    log: Log = attrs.field(repr=False)

    def wait_event(self, event: "Event") -> None:
        self.log.append(("wait", event, self))


@attrs.define(eq=False)
class Event:
    log: Log = attrs.field(repr=False)

    def record(self, stream: Stream) -> None:
        self.log.append(("record", self, stream))


@attrs.frozen(eq=False)
class StandIn(Backend):
    """The CUDA backend whose device is the host."""

    def put(self, tree: Any, *, copy: bool = False) -> Any:
        return Backend("host", {}).put(tree, copy=copy)


class Machine:
    """A device module: what `torch_streams` uses of `torch.cuda`."""

    def __init__(self) -> None:
        self.log: Log = []
        self.labels: dict[
            int, object
        ] = {}  # what a test calls a tensor, by its id; a log that held it would be its owner
        self.caller = self.current = Stream(self.log)

    def module(self) -> SimpleNamespace:
        return SimpleNamespace(
            Stream=lambda: Stream(self.log),
            Event=lambda: Event(self.log),
            current_stream=lambda: self.current,
            set_stream=self.set_stream,
            synchronize=lambda: self.log.append(("synchronize",)),
        )

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.log.append(("keep", self.labels.get(id(tensor)), stream))

    def backend(self, ranks: int) -> Backend:
        return StandIn("cuda", cuda.RULES, ranks=ranks, device="cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The stand-in in the place of `torch.cuda`: tensors stay on the host, all else is as on a GPU."""
    made = Machine()
    modules = {"cuda": made.module()}
    monkeypatch.setattr(torch, "get_device_module", modules.__getitem__)
    monkeypatch.setattr(torch_streams, "_elsewhere", lambda *_: None)
    monkeypatch.setattr(torch_streams, "arrive", lambda tensor, *, device: tensor.clone())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: made.keep(tensor, stream))
    yield made


@pytest.fixture(params=["stand-in", "gpu"])
def on_cuda(request: pytest.FixtureRequest) -> Callable[[int], Backend]:
    """A maker of backends of so many ranks."""
    if request.param == "stand-in":
        made: Machine = request.getfixturevalue("machine")
        return made.backend
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    return lambda ranks: backends.get("cuda", ranks=ranks)
