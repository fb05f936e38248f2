"""What a rank of a group does where a test asks it for a command: the command, in a process that is forked."""

import contextlib
import io
import os
from typing import Any

import torch.distributed as dist

from mla_fx.cli import main
from tests.processes import Member, Nursery


def command(member: Member, *, port: int, arguments: list[str]) -> tuple[int, str, str]:
    """Status, output and errors, with the environment that torchrun gives."""
    told = {"RANK": member.rank, "WORLD_SIZE": member.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in told.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


def commanded(processes: Nursery, ranks: int, *arguments: str, **given: Any) -> list[tuple[int, str, str]]:
    """What the command gave in each of `ranks` processes, whose store is here."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return processes.run(command, ranks=ranks, port=store.port, arguments=list(arguments), **given)
