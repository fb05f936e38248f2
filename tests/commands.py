"""What a rank of a group does where a test asks it for a command: the command, in a process that is forked."""

import contextlib
import io
import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mla_fx import cli
from mla_fx.cli import main
from mla_fx.models import Engine
from mla_fx.models.addition import DIRECTORY
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


def typed(
    member: Member, *, port: int, arguments: list[str], pieces: Sequence[Sequence[str]]
) -> tuple[tuple[int, str, str], str]:
    """The command, while somebody types this rank's pieces, with a pause before each; and what it did not read."""
    reading, writing = os.pipe()
    os.dup2(reading, 0)

    def type_in() -> None:
        with open(writing, "w") as keys:
            for piece in pieces[member.rank]:
                time.sleep(0.7)  # longer than rank 0 waits before it tells the others that there is nothing
                keys.write(piece)
                keys.flush()

    typing = threading.Thread(target=type_in)
    typing.start()
    found = command(member, port=port, arguments=arguments)
    typing.join()
    return found, os.read(0, 1 << 16).decode()


def told_twice(member: Member) -> tuple[int, str, str]:
    """`mla-fx show` in a group, told SIGINT where it begins, and SIGTERM when it may say that it was stopped."""

    def interrupted(model: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def may_say(text: str) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    cli._must_be_directory, cli.first_to_say = interrupted, may_say  # type: ignore[assignment]
    return command(member, port=0, arguments=["show"])


def commanded(
    processes: Nursery, ranks: int, *arguments: str, fate: str = "", pieces: Sequence[Sequence[str]] = ()
) -> list[Any]:
    """What the command gave in each of `ranks` processes, whose store is here; None where it did not end by itself."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given: dict[str, Any] = {"port": store.port, "arguments": list(arguments)}
    if fate:
        return [outcome.value for outcome in processes.outcomes(met, ranks=ranks, fate=fate, **given)]
    if pieces:
        return processes.run(typed, ranks=ranks, pieces=pieces, **given)
    return processes.run(command, ranks=ranks, **given)


def chatty(directory: Path) -> Path:
    """The trained model with a chat template: turns one after the other, with an end behind each answer."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        os.link(DIRECTORY / name, directory / name)
    template = (
        "{% for m in messages %}"
        "{% if m.role == 'assistant' %}{{ m.content }}<eos>{% else %}<bos>{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    (directory / "chat_template.jinja").write_text(template)
    return directory
