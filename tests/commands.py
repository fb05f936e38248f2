"""What a rank of a group does where a test asks it for a command: the command, in a process that is forked."""

import contextlib
import io
import itertools
import os
import signal
from typing import Any

import torch.distributed as dist

from mla_fx.cli import main
from mla_fx.models import Engine
from tests.processes import Member, Nursery


def command(member: Member, *, port: int, arguments: list[str]) -> tuple[int, str, str]:
    """Status, output and errors, with the environment that torchrun gives."""
    told = {"RANK": member.rank, "WORLD_SIZE": member.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in told.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


def met(member: Member, *, port: int, arguments: list[str], fate: str) -> tuple[int, str, str]:
    """The command, in which rank 1 meets its fate in the third step of the engine."""
    step, calls = Engine.step, itertools.count(1)

    def fated(engine: Engine) -> Any:
        if member.rank == 1 and next(calls) == 3:
            if fate == "dies":
                os._exit(9)
            os.kill(os.getpid(), signal.SIGTERM)
        return step(engine)

    Engine.step = fated  # type: ignore[method-assign]
    return command(member, port=port, arguments=arguments)


def commanded(processes: Nursery, ranks: int, *arguments: str, fate: str = "") -> list[Any]:
    """What the command gave in each of `ranks` processes, whose store is here; None where it did not end by itself."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given: dict[str, Any] = {"port": store.port, "arguments": list(arguments)}
    if not fate:
        return processes.run(command, ranks=ranks, **given)
    return [outcome.value for outcome in processes.outcomes(met, ranks=ranks, fate=fate, **given)]
