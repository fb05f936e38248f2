"""`--processes N`: the command in N processes of this machine, as `torchrun --nproc-per-node N -m mla_fx` starts it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch.distributed as dist

#: How long processes may take to end when they are told to, in seconds.
_GRACE: Final = 10.0
#: How often it is looked at who has ended, in seconds.
_LOOK: Final = 0.02


def launch(arguments: Sequence[str], processes: int, *, patience: float) -> int:
    """Run `python -m mla_fx` with these arguments in as many processes; the exit status is theirs.

    When one fails the others have `patience` seconds to notice, and say what they lost; then they are ended.  Ctrl-C
    and SIGTERM are handed on as SIGTERM, once.
    """
    stopped: list[int] = []
    # On a port that is free.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with _noted(stopped):
        children = [_start(arguments, rank, processes, store.port) for rank in range(processes)]
        try:
            if _wait(children, lambda: bool(stopped) or any(child.poll() for child in children)):
                status = max(child.returncode for child in children)
            else:
                failed = [child.returncode for child in children if child.returncode]
                if stopped or not _wait(children, lambda: bool(stopped), patience):
                    _end(children)
                status = 128 + stopped[0] if stopped else failed[0]
        finally:
            for child in children:
                child.kill()
                child.wait()
    return status if status >= 0 else 128 - status  # as a shell says of one that a signal ended


def _start(arguments: Sequence[str], rank: int, processes: int, port: int) -> "subprocess.Popen[bytes]":
    threads = max(1, (os.cpu_count() or 1) // processes)
    told: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is here, not with rank 0
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
    }
    if rank:  # warnings of libraries that are not Python's, which would come once for each process
        told["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment = os.environ | {name: str(value) for name, value in told.items()}
    stdin = None if rank == 0 else subprocess.DEVNULL
    noting = signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # inherited: a terminal tells Ctrl-C to all, this one hands on
    try:
        return subprocess.Popen([sys.executable, "-m", "mla_fx", *arguments], env=environment, stdin=stdin)
    finally:
        signal.signal(signal.SIGINT, noting)


@contextlib.contextmanager
def _noted(stopped: list[int]) -> Iterator[None]:
    """Ctrl-C and SIGTERM are noted, and interrupt nothing."""

    def note(number: int, frame: Any) -> None:
        stopped.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(
    children: Sequence["subprocess.Popen[bytes]"], over: Callable[[], bool], patience: float | None = None
) -> bool:
    """Wait until all have ended, which is True, or until it is over, or for so many seconds."""
    end = None if patience is None else time.monotonic() + patience
    while any(child.poll() is None for child in children):
        if over() or (end is not None and time.monotonic() > end):
            return False
        time.sleep(_LOOK)
    return True


def _end(children: Sequence["subprocess.Popen[bytes]"]) -> None:
    for child in children:
        child.terminate()
    _wait(children, lambda: False, _GRACE)
