"""A command in a group of processes: it joins the group that its environment names, and one of them prints.

`torchrun` and `mla-fx ... --processes N` start processes with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT.  Each runs the same command on the same arguments.
"""

import contextlib
import hashlib
import logging
import os
import signal
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from mla_fx import backends
from mla_fx.effects import InputError

#: What moves between the processes of a backend.
TRANSPORT: Final = {"cpu": "gloo", "reference": "gloo", "ascend": "hccl", "cuda": "nccl"}


def place() -> tuple[int, int] | None:
    """Rank and size of the group that the environment names; None where it names none.

    Raises `InputError` for one that is none.
    """
    told = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]
    if told == [None, None]:
        return None
    if not all(one is not None and one.isdecimal() for one in told) or int(told[0] or 0) >= int(told[1] or 0):
        raise InputError(f"RANK, WORLD_SIZE: must be a rank and a larger number of processes: got {told}")
    return int(told[0] or 0), int(told[1] or 0)


@contextlib.contextmanager
def joined(backend: str, seconds: float) -> Iterator[Any]:
    """The group of all processes for a backend, by `backends.join`, which says what `seconds` are.

    In here all ranks but the first print nothing.
    """
    found = place()
    assert found is not None
    with (
        _silent() if found[0] else contextlib.nullcontext(),
        backends.join(TRANSPORT[backend], timeout=seconds) as group,
    ):
        yield group


def first_to_say(text: str) -> bool:
    """Whether no other process has said the same, so that what all refuse is printed once.

    Asked of the store that torchrun, or `--processes`, holds for them; without one everybody is the first.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))  # type: ignore[attr-defined]
        return bool(store.add(f"mla_fx/said/{again}/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1)
    except (RuntimeError, KeyError, ValueError):  # whoever held it has gone
        return True


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(action="ignore"),
    ):
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """In a group SIGTERM is what Ctrl-C is: `KeyboardInterrupt`, once.  What ends then is not to be interrupted again.

    A terminal tells Ctrl-C to the launcher and to all that it started, and the launcher tells them again: whoever is
    told first ends in peace, up to its last word.
    """
    if "RANK" not in os.environ:
        yield
        return

    def stop(number: int, frame: Any) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, lambda number, frame: None)  # ignored: Python would complain of one that is pending
        raise KeyboardInterrupt

    before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
