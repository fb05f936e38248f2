"""Cases run in another process, so that one that takes its process with it costs nothing but itself.

A fault of an NPU stays with the process that saw it, and an operator may end
its process altogether, or never come back.  The next case then starts in a new
process, until all have been asked or the device cannot be opened any more.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mla_fx.backends.ascend.probe.point import About, Found, Outcome, Point, each
from mla_fx.effects import InputError

#: What runs the cases on the device that is found.
COMMAND = (sys.executable, "-m", "mla_fx.backends.ascend.probe")
#: Seconds until a device is open.
_OPENING = 600.0


def apart(
    points: Sequence[Point], *, command: Sequence[str] = COMMAND, patience: float = 600
) -> Iterator[About | Found]:
    """What there is, then what came of every case; a case has `patience` seconds.

    `command` gets the number of a pipe and that of the case to start with, and
    speaks as `__main__` says.  Raises `InputError` where the device cannot be
    opened at all.
    """
    asked, start, known = each(points), 0, False
    while start < len(asked):
        first, begun, why = start, None, ""
        for kind, what in _heard(command, start, patience):
            if kind == "about" and not known:
                known = True
                yield About(what["versions"], what["environment"], tuple(what["cann"]))
            elif kind == "begun":
                begun = what
            elif kind == "found":
                begun, start = None, start + 1
                yield Found(what["point"], what["case"], Outcome(**what["outcome"]))
            elif kind in ("error", "ended"):
                why = why or what
        if start == len(asked):
            return
        if not known:
            raise InputError(why)
        if begun is not None:
            yield _found(asked[begun], Outcome("faults", why))
            start = begun + 1
        elif start == first:  # it did not come as far as a case
            yield from (_found(one, Outcome("not run", why)) for one in asked[start:])
            return


def _found(asked: tuple[Any, Any], outcome: Outcome) -> Found:
    point, case = asked
    return Found(point.number, case.name, outcome)


def _heard(command: Sequence[str], start: int, patience: float) -> Iterator[tuple[str, Any]]:
    """What one process says, line by line, and last how it ended."""
    hear, say = os.pipe()
    process = subprocess.Popen([*command, str(say), str(start)], pass_fds=[say], stdout=subprocess.DEVNULL)
    os.close(say)
    try:
        for line in _lines(hear, patience):
            if line is None:
                yield "ended", f"no answer within {patience:g} s"
                return
            yield from json.loads(line).items()
        yield "ended", f"the process ended with status {process.wait(60)}"
    finally:
        os.close(hear)
        if process.poll() is None:
            process.kill()
            process.wait(60)


def _lines(hear: int, patience: float) -> Iterator[bytes | None]:
    """Whole lines until the end; None where the next does not come in time.  The first says that the device is open."""
    rest, end = b"", time.monotonic() + _OPENING
    while True:
        *whole, rest = rest.split(b"\n")
        for line in whole:
            yield line
            end = time.monotonic() + patience
        if not select.select([hear], [], [], max(0.0, end - time.monotonic()))[0]:
            yield None
            return
        if not (piece := os.read(hear, 1 << 16)):
            return
        rest += piece
