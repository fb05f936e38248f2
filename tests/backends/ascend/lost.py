"""What ranks over the emulated HCCL do when one of them is lost: functions of a member, run by `tests.processes`."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from mla_fx import backends, orchestrations
from mla_fx.backends import PeerError, RunError
from mla_fx.backends.ascend.emulator import emulate
from mla_fx.effects import schedule
from tests.backends.ascend.steps import setup
from tests.backends.lost import CULPRIT, Fault, told
from tests.processes import Member


def outlive(member: Member, *, errors: str, **given: Any) -> Any:
    """As `lose`, where HCCL itself would wait for long; `errors`: the folder for what a rank prints of errors."""
    os.environ["HCCL_EXEC_TIMEOUT"] = "90"
    os.dup2(os.open(f"{errors}/{member.rank}", os.O_WRONLY | os.O_CREAT), 2)
    return lose(member, **given)


def lose(member: Member, *, how: str, collective: int, timeout: float) -> Any:
    """One good step, and one in which the culprit fails."""
    emulate(seed=member.rank)
    given, culprit = setup("bf16", ranks=member.ranks), Path(f"{member.store}.culprit")
    fault, begun = Fault(how, collective, timeout), time.monotonic()
    store = dist.FileStore(member.store, member.ranks)
    try:
        with backends.join("hccl", timeout=timeout, store=store, rank=member.rank, ranks=member.ranks) as group:
            backend = backends.get("ascend", ranks=member.ranks, group=group)
            if member.rank == CULPRIT:
                culprit.write_text(str(os.getpid()))
                backend = fault.into(backend)
            run = given.compiled(backend, schedule(given.step, orchestrations.attention_aside))
            own = backend.put([[argument[member.rank]] for argument in given.arguments()])

            def step() -> list[torch.Tensor]:
                caches, *rest = own
                results = run(pytree.tree_map(lambda cache: cache.clone(), caches), *rest)
                with backend.reading():
                    return [leaf.cpu() for leaf in pytree.tree_leaves(results)]

            good = step()
            fault.arm()
            begun = time.monotonic()
            return {"same": all(map(torch.equal, good, step()))}
    except (PeerError, RunError) as error:
        return told(error, begun)
    finally:
        if member.rank == 0 and how == "stopped":
            os.kill(int(culprit.read_text()), signal.SIGKILL)
