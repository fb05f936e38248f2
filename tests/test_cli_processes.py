"""The command line in a group of processes: who reads, who prints, and how all of them end."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mla_fx.cli import main
from mla_fx.cli_processes import launch
from mla_fx.models.addition import problems
from tests.commands import chatty, commanded, told_twice

ROOT = Path(__file__).parents[1]
PROMPTS = ("347 + 25 =", "9 + 4 =", "915 + 0 =")
ASKED = ("generate", *(argument for prompt in PROMPTS for argument in ("--prompt", prompt)), "--dtype", "fp32")


def alone(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def untimed(text: str) -> str:
    return re.sub(r"[\d.]+ s\b|[\d.]+ tokens per second", "", text)


# --- in the environment of torchrun -----------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        (2, (*ASKED, "--logprobs", "1")),
        (4, (*ASKED, "--drafts", "2", "--temperature", "0.7", "--backend", "reference")),
        (2, ("decode", "--steps", "4", "--dtype", "fp32")),
    ],
)
def test_one_rank_prints_what_one_process_would(processes, capsys, ranks, command):
    """The same texts and figures; the others print nothing.  Ranks are as many as processes."""
    wanted = alone(capsys, *command, "--ranks", str(ranks))
    assert wanted[0] == 0 and wanted[1]
    first, *others = commanded(processes, ranks, *command)
    assert known(first) == known(wanted)
    assert others == [(0, "", "")] * (ranks - 1)


def known(found: tuple[int, str, str]) -> list[str]:
    """Status and all that is printed, without times and what the order of a sum may change in the last digits."""
    status, out, err = found
    text = re.sub(r"deviation.*?; ", "", untimed(out + err))
    return [str(status), re.sub(r"-?\d\.\d{3}\b", lambda number: f"{float(number[0]):.1f}", text)]


@pytest.mark.parametrize("from_lines", [False, True])
def test_a_conversation(processes, capsys, tmp_path, from_lines):
    """The same as in one process, said once.  Of lines, those of rank 0 count, and nobody else reads any."""
    directory, (first, second, *_) = chatty(tmp_path), PROMPTS
    asked = ("generate", "--model", str(directory), "--chat", "--dtype", "fp32", "--block-size", "2")
    turns = ("--prompt", first, "--prompt", second)
    status, out, err = alone(capsys, *asked, *turns, "--ranks", "2")
    assert status == 0 and out.startswith(f"> {first}\n372\n> {second}\n") and "prefix cache: " in err
    if from_lines:
        pieces = [[f"{first}\n", second[:3], second[3:]], ["1 + 1 =\n"]]
        (told, left), (other, unread) = commanded(processes, 2, *asked, pieces=pieces)
        assert (left, unread) == ("", "1 + 1 =\n")
    else:
        told, other = commanded(processes, 2, *asked, *turns)
    assert known(told) == known((status, out, err)) and other == (0, "", "")


README = re.findall(r"^mla-fx (\w+ .*--processes .*?)\s+#", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.mark.soak
@pytest.mark.parametrize("command", README)
def test_commands_of_the_readme(processes, command):
    arguments = command.split()
    first, *others = commanded(processes, int(arguments[arguments.index("--processes") + 1]), *arguments)
    assert first[0] == 0 and all(one == (0, "", "") for one in others)
    asked = problems(3, seed=0)
    assert first[1] == "".join(f"> {prompt}\n{answer}\n" for prompt, answer in asked)


def test_the_readme_goes_from_one_process_to_eight():
    assert len(README) == 2 and all("--processes 8" in command for command in README)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "3"), "ranks: must be the size of the group, 2: got 3"),
        (("--processes", "4"), "--processes: must be as many as there are, 2: got 4"),
        (("--model", "nowhere"), "--model: must be a checkpoint directory: got 'nowhere'"),
        (("--adversary", "3"), "adversary: it plays all ranks on the host: got seed 3 for 1 of 2 ranks on cpu"),
        (("--stop", ""), "stop: must be a sequence of texts that are not empty: got ['']"),
    ],
)
def test_what_all_refuse_is_said_once(processes, arguments, message):
    found = commanded(processes, 2, *ASKED, *arguments)
    assert [status for status, _, _ in found] == [2, 2]
    assert all(out == "" for _, out, _ in found)
    told = [err for _, _, err in found if err]
    assert len(told) == 1 and message in told[0]


def test_a_rank_that_dies_is_named_once(processes):
    """In the middle of texts: within the time-out the others have ended, and one of them says who was lost."""
    start = time.monotonic()
    first, lost, *others = commanded(processes, 4, *ASKED, "--timeout", "10", fate="dies")
    assert lost is None and [one[0] for one in (first, *others)] == [1, 1, 1] and time.monotonic() - start < 60
    (told,) = [err for _, _, err in (first, *others) if "lost" in err]
    assert "mla-fx generate: " in told and "lost rank 1: " in told and "Traceback" not in told


def test_a_rank_that_is_stopped_stops_the_others(processes):
    """SIGTERM, as torchrun ends processes, told to one of two."""
    found = commanded(processes, 2, *ASKED, "--timeout", "20", fate="is stopped")
    assert [status for status, _, _ in found] == [130, 130]
    assert sum(err.count("mla-fx generate: stopped\n") for _, _, err in found) == 1
    assert not any("lost" in err or "Traceback" in err for _, _, err in found)


# --- processes of a command's own ---------------------------------------------------


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Lets the processes of `launch` run a script in place of Python: `python("exit $RANK")`."""

    def use(script: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\ncd {tmp_path}\necho $$ > pid$RANK\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(path))
        return tmp_path

    return use


def gone(folder: Path, ranks: int) -> bool:
    """Whether none of the processes is left."""
    return not any(Path("/proc", (folder / f"pid{rank}").read_text().strip()).exists() for rank in range(ranks))


def test_what_processes_are_told(python, monkeypatch):
    """As torchrun tells them; the port is that of a store which is there."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folder = python("env > env$RANK; echo $* > arguments$RANK; cat > stdin$RANK")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert launch(["generate", "--prompt", "1"], 3, patience=9) == 0
    for rank in range(3):
        told = dict(line.split("=", 1) for line in (folder / f"env{rank}").read_text().splitlines() if "=" in line)
        wanted = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "OMP_NUM_THREADS": 2}
        assert {name: told[name] for name in wanted} == {name: str(value) for name, value in wanted.items()}
        assert told["MASTER_ADDR"] == "127.0.0.1" and int(told["MASTER_PORT"]) > 0
        assert (folder / f"arguments{rank}").read_text() == "-m mla_fx generate --prompt 1\n"


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 0", 0),
        ("[ $RANK = 1 ] && exit 3; exec sleep 60", 3),
        ("[ $RANK = 2 ] && kill -KILL $$; exec sleep 60", 137),
        ("[ $RANK = 1 ] && exit 5; trap '' TERM; sleep 0.3; exit 1", 5),  # the first that fails counts
        ("[ $RANK = 0 ] && sleep 0.2 && exit 2; exit 0", 2),
    ],
)
def test_one_that_fails_ends_the_others(python, script, status):
    folder, start = python(script), time.monotonic()
    assert launch([], 3, patience=0.5) == status
    assert time.monotonic() - start < 8
    assert gone(folder, 3)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_all(python, number, status):
    """They get SIGTERM, once, and may tidy up; the handlers from before are back."""
    folder = python("trap 'echo x >> told$RANK; exit 0' TERM; touch ready$RANK; while true; do sleep 0.05; done")
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]

    def stop() -> None:
        while not all((folder / f"ready{rank}").exists() for rank in range(3)):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop).start()
    assert launch([], 3, patience=9) == status
    assert gone(folder, 3)
    assert [(folder / f"told{rank}").read_text() for rank in range(3)] == ["x\n"] * 3
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_ctrl_c_ends_all_processes():
    """The command itself, in two processes: text comes as it is generated, and Ctrl-C, which a terminal tells all."""
    command = [sys.executable, "-m", "mla_fx", "generate", "--processes", "2", "--ignore-end"]
    command += ["--prompt", "9 + 4 ="] * 12  # of which two run at a time: far from the end when it comes
    with subprocess.Popen(
        [*command, "--max-new-tokens", "900"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("> ") and process.stdout.read(3) and process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "Traceback" not in err and err.count("mla-fx generate: stopped\n") == 1
    assert len(re.findall(r"\d+ tokens in [\d.]+ s", err)) == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_told_twice_it_still_says_so(processes):
    """Ctrl-C comes from the terminal, and SIGTERM from the launcher, at the worst moment: before the last word."""
    assert processes.run(told_twice, ranks=1) == [(130, "", "\nmla-fx show: stopped\n")]


@pytest.mark.soak
def test_two_machines():
    """Two agents of torchrun that find each other, as on two machines, with a process each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "7"]
    agents = [
        subprocess.Popen(
            [*command, *meet, "-m", "mla_fx", *ASKED],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    found = [agent.communicate(timeout=300) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], found
    printed = [out for out, _ in found if out]
    assert len(printed) == 1 and printed[0].splitlines()[1::2] == ["372", "13", "915"]
