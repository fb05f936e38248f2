"""An emulated CANN: the unmodified torch_npu wheel on a machine without an NPU.

    from mla_fx.backends.ascend.emulator import emulate

    emulator = emulate(seed=7)              # before torch_npu is imported
    backend = backends.get("ascend", ranks=4)

The wheel's allocator, streams, events, `record_stream`, host queue, dispatcher
and argument checks are the real ones.  Below them, device memory is host
memory, streams run as late as they may and interleaved by a seed, and
operators are a few lines of torch each, with the refusals of the real ones.
Processes that each emulate a device form groups, `init_process_group("hccl")`,
over an emulated HCCL on one machine; what does not match between ranks, a rank
that ends and one that does not come within HCCL_EXEC_TIMEOUT seconds (120) are
errors where the host waits.  With several processes a seed leads the
interleaving, but how fast peers are is not drawn.

Nothing here says how fast an NPU is, and nothing here has been compared with one.
"""

import contextlib
import os
import sys
from functools import cache

from mla_fx.backends.ascend.emulator.build import library_folder
from mla_fx.backends.ascend.emulator.machine import Machine as Machine
from mla_fx.backends.ascend.emulator.machine import Traced as Traced
from mla_fx.backends.ascend.emulator.operators import OPERATORS
from mla_fx.effects import InputError


@cache
def _machine() -> Machine:
    return Machine(library_folder(list(OPERATORS)), OPERATORS)


def load() -> Machine:
    """Put the emulated CANN under torch_npu in this process, for good, and import torch_npu over it.

    The first call compiles the libraries unless they are in the cache.  The
    device is not touched and no thread is started, so that a process which has
    loaded may fork others, each with a device of its own.  Raises `InputError`
    when torch_npu is missing or was imported before, or when nothing can be compiled.
    """
    if not _machine.cache_info().currsize:
        if "torch_npu" in sys.modules:
            raise InputError("emulate: must be called before torch_npu is imported: got it imported over another CANN")
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # for processes that are started from here
    machine = _machine()
    with contextlib.redirect_stdout(sys.stderr):  # on which the wheel has things to say about its environment
        import torch_npu  # noqa: F401

    return machine


def emulate(*, seed: int = 0) -> Machine:
    """Load it (see `load`) and set a seed: the machine of this process, the same one in every call."""
    machine = load()
    machine.seed(seed)
    return machine
