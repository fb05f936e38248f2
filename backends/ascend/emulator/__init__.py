"""An emulated CANN: the unmodified torch_npu wheel on a machine without an NPU.

    from mla_fx.backends.ascend.emulator import emulate

    emulator = emulate(seed=7)              # before torch_npu is imported
    backend = backends.get("ascend", ranks=4)

The wheel's allocator, streams, events, `record_stream`, host queue, dispatcher
and argument checks are the real ones.  Below them, device memory is host
memory, streams run as late as they may and interleaved by a seed, and
operators are a few lines of torch each, with the refusals of the real ones.
Processes that each emulate a device form groups, `init_process_group("hccl")`,
over an emulated HCCL on one machine of eight devices; what does not match between ranks, a rank
that ends and one that does not come within HCCL_EXEC_TIMEOUT seconds (120) are
errors where the host waits.  With several processes a seed leads the
interleaving, but how fast peers are is not drawn.

It plays three releases of CANN, `emulate(cann="8.5")`, "9.0" and "9.1", the
newest unless told: what a release refuses, it refuses, and what a release
leaves unwritten stays NaN.  `emulator.operator` adds an operator;
`python -m mla_fx.backends.ascend.emulator` runs a script or a module over it.
README.md in this folder says how.

Nothing here says how fast an NPU is, and nothing here has been compared with one.
"""

import contextlib
import ctypes
import io
import os
import sys
from collections.abc import Iterator
from functools import cache

import torch

from mla_fx.backends.ascend.emulator.build import library_folder, wheel
from mla_fx.backends.ascend.emulator.machine import Machine as Machine
from mla_fx.backends.ascend.emulator.machine import Traced as Traced
from mla_fx.backends.ascend.emulator.operator import RefusedError as RefusedError
from mla_fx.backends.ascend.emulator.operators import operators
from mla_fx.backends.ascend.emulator.releases import NEWEST, RELEASES, release
from mla_fx.effects import InputError


@cache
def _machine() -> Machine:
    newest = RELEASES[NEWEST]
    return Machine(library_folder(list(operators(newest))), operators, newest)


def load(*, cann: str | None = None) -> Machine:
    """Put the emulated CANN under torch_npu in this process, for good, and import torch_npu over it.

    The first call compiles the libraries unless they are in the cache.  The
    device is not touched and no thread is started, so that a process which has
    loaded may fork others, each with a device of its own.  `cann` is the
    release: the newest, or what this process plays already.  A process may
    play one after the other; what the wheel itself keeps of the first (it asks
    once) concerns none of the operators here.  Raises `InputError` when
    torch_npu is missing or was imported before, when nothing can be compiled,
    or for another release.
    """
    chosen = None if cann is None else release(cann)
    first = not _machine.cache_info().currsize
    if first and "torch_npu" in sys.modules:
        raise InputError("emulate: must be called before torch_npu is imported: got it imported over another CANN")
    machine = _machine()
    if chosen is not None:
        machine.play(chosen)
    if first:
        folder = str(wheel().parent)
        found = folder in sys.path
        if not found:  # put there for as long as the import takes: processes that are spawned inherit the path
            sys.path.append(folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()), _quiet():  # on stdout it misses a CANN in the environment
                import torch_npu  # noqa: F401
        finally:
            if not found:
                sys.path.remove(folder)
    return machine


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the wheel prints to stderr at every start, on any device; below Python, so for the process."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


#: PR_SET_TIMERSLACK of <linux/prctl.h>, and the slack that is asked for, in ns; 0 brings back what was there.
_SET_TIMERSLACK, _SLACK = 29, 10_000_000


@contextlib.contextmanager
def _unhurried() -> Iterator[None]:
    """Threads started meanwhile may sleep 10 ms longer than they ask for.

    The wheel starts one that looks every few microseconds, for as long as the process lives, whether there is
    something to let go: it takes a tenth of a core.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_TIMERSLACK, ctypes.c_ulong(_SLACK))
    try:
        yield
    finally:
        prctl(_SET_TIMERSLACK, ctypes.c_ulong(0))


@cache
def _touch() -> None:
    """The first allocation, which warns, and starts the wheel's threads."""
    with _quiet(), _unhurried():
        torch.empty(1, device="npu")


def emulate(*, seed: int = 0, cann: str | None = None) -> Machine:
    """Load it (see `load`) and set a seed: the machine of this process, the same one in every call."""
    machine = load(cann=cann)
    _touch()
    machine.seed(seed)
    return machine
