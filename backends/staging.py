"""Integers on their way to a device: buffers of an executable's own, filled anew by every step.

What a step sends is copied into pinned memory first, so that the caller may
refill his own at once, and one copy on the main stream brings all of it over;
the host waits for nothing.  There are two pinned buffers in turn, each behind
the event of its last copy: a host that is two steps ahead waits there.  On the
device there is one buffer, of the main stream's memory: all streams have joined
main when the next step overwrites it, and when it is freed.  For a captured
program it stays where it is, whichever stream is main.
"""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field

from mla_fx.backends.device import Device
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval

#: Bytes that every value starts at a multiple of, which suits any dtype and what copies like.
ALIGNED = 64


@define(eq=False)
class Staging:
    """Buffers for values of these shapes, in this order."""

    device: Device
    avals: Sequence[Aval]
    starts: Sequence[int]  # byte at which each value begins
    pinned: list[torch.Tensor]
    events: list[Any]
    stays: bool = False
    views: list[list[torch.Tensor]] = field(init=False)  # of each pinned buffer
    used: list[bool] = field(factory=lambda: [False, False])
    turn: int = 0
    main: Any = None  # the stream whose memory the device's buffer is
    sent: torch.Tensor = field(init=False)
    arrived: tuple[torch.Tensor, ...] = ()  # views of it

    def __attrs_post_init__(self) -> None:
        self.views = [self.cut(buffer) for buffer in self.pinned]

    @classmethod
    def of(cls, avals: Sequence[Aval], device: Device, *, stays: bool = False) -> "Staging":
        """Make the buffers: pinned memory is never allocated in a step."""
        starts, size = [], 0
        for aval in avals:
            starts.append(size)
            size += -(-aval.bytes_ // ALIGNED) * ALIGNED
        pinned = [device.pinned(size) for _ in range(2)]
        return cls(device, avals, starts, pinned, [device.module.Event() for _ in pinned], stays)

    def cut(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The values that lie in a buffer."""
        return [
            buffer[start : start + aval.bytes_].view(DTYPES[aval.dtype]).view(aval.shape)
            for start, aval in zip(self.starts, self.avals, strict=True)
        ]

    def send(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Send values on main, which is current; returns them as they are on the device."""
        if self.main is not self.device.caller and not (self.stays and self.main):
            self.main = self.device.caller
            self.sent = torch.empty(len(self.pinned[0]), dtype=torch.uint8, device=self.device.kind)
            self.arrived = tuple(self.cut(self.sent))
        turn = self.turn
        self.turn = 1 - turn
        if self.used[turn]:
            self.events[turn].synchronize()
        for view, value in zip(self.views[turn], values, strict=True):
            view.copy_(value)
        self.sent.copy_(self.pinned[turn], non_blocking=True)
        self.events[turn].record(self.device.caller)
        self.used[turn] = True
        return self.arrived
