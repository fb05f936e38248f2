"""A process joins the others: the group, with the time-out that holds for all that it waits for.

with backends.join("gloo", timeout=30) as group:
    backend = backends.get("cpu", ranks=8, group=group)
    backend.agree({"model": ...})
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any, Final

import torch.distributed as dist

from mla_fx.backends.device import device
from mla_fx.backends.peers import PeerError, Peers
from mla_fx.effects import InputError

#: Kinds of groups, and the device whose collectives they carry.
_KINDS: Final[Mapping[str, str]] = {"gloo": "cpu", "hccl": "npu", "nccl": "cuda"}
#: For how many seconds, at least, a process waits for the others to have started.
_STARTING: Final = 60.0


@contextmanager
def join(
    kind: str, *, timeout: float = 30.0, store: Any = None, rank: int | None = None, ranks: int | None = None
) -> Iterator[Any]:
    """The whole group, `dist.group.WORLD`, of `kind` "gloo", "hccl" or "nccl"; it is left at the end.

    Who it is says the environment, as torchrun sets it (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK), or
    `store`, `rank` and `ranks`, all three.  A process takes the device of number LOCAL_RANK.

    `timeout`, in seconds: when a rank dies, stops, hangs or raises, every other one fails within it (`PeerError`) with
    the rank, the collective, its layer and its group.  It has to be longer than what the slowest rank may be behind
    the fastest, loading a checkpoint included; only for the others to start, a process waits for a minute at least.
    HCCL itself waits for HCCL_EXEC_TIMEOUT seconds, which is set to it where it is not set.

    What fails in here is told to the others.  Raises `InputError` for another kind, for no group, and where there is a
    group already; `PeerError` where the others do not come.
    """
    _check(kind, timeout, (store, rank, ranks))
    if kind == "hccl":
        import_module("mla_fx.backends.ascend").require_torch_npu()
        os.environ.setdefault("HCCL_EXEC_TIMEOUT", str(math.ceil(timeout)))
    if kind != "gloo":
        device(_KINDS[kind])
    given = {} if store is None else {"store": store, "rank": rank, "world_size": ranks}
    try:
        dist.init_process_group(kind, timeout=timedelta(seconds=max(timeout, _STARTING)), **given)
    except RuntimeError as error:
        raise PeerError((), str(error), "join") from None
    group = dist.group.WORLD
    peers = Peers.of(group, timeout=timeout)
    try:
        yield group
    except BaseException as error:
        peers.failed(error)
        peers.leave()
        if kind == "gloo":  # a device that has failed would be waited for
            dist.destroy_process_group()
        raise
    peers.leave()
    dist.destroy_process_group()


def _check(kind: str, timeout: float, given: tuple[Any, ...]) -> None:
    if kind not in _KINDS:
        raise InputError(f"kind: must be one of {', '.join(_KINDS)}: got {kind!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise InputError(f"timeout: must be a number of seconds above 0: got {timeout!r}")
    if not dist.is_available() or dist.is_initialized():
        raise InputError("group: must be the first of this process, where torch has groups: got another one")
    if any(one is None for one in given) and any(one is not None for one in given):
        raise InputError("store, rank, ranks: must be given together or not at all: got some of them")
    if given[0] is None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise InputError(f"{name}: must be set, as torchrun does for every process: got none")
