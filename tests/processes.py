"""Groups of processes for tests, forked from one that has loaded what they need.

Loading torch (and torch_npu) takes seconds, and a group of eight would take
them eight times.  So one process loads, starts no thread and touches no device,
and forks the ranks of every group that a test asks for, each in milliseconds.
For ranks over the emulated CANN it forks another such process, which loads that
too.
A test gets what each rank returned or raised.  Ranks that are still there when
the time is up are killed, by their ids.
"""

import gc
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from attrs import field, frozen

from mla_fx import backends

ROOT = Path(__file__).resolve().parents[1]


@frozen
class Member:
    """What a process knows of its group."""

    rank: int
    ranks: int
    store: str

    def join(self, kind: str, again: int = 0) -> Any:
        """The group, made with "hccl" or "gloo"; `again`: a fresh one, of those who have left the one before."""
        store = dist.FileStore(f"{self.store}{again}", self.ranks)
        dist.init_process_group(
            kind, store=store, rank=self.rank, world_size=self.ranks, timeout=timedelta(seconds=120)
        )
        return dist.group.WORLD

    def tell(self, what: str) -> None:
        """Say something to the others, outside of the group."""
        Path(f"{self.store}.{what}").touch()

    def hear(self, what: str, limit: float = 60) -> None:
        """Wait until somebody has said it."""
        end = time.monotonic() + limit
        while not Path(f"{self.store}.{what}").exists():
            assert time.monotonic() < end, f"nobody said {what!r}"
            time.sleep(0.002)


@frozen
class Outcome:
    """What came of a rank: `value`, or the text of an error."""

    process: int
    seconds: float
    value: Any = None
    error: str | None = None


@frozen
class Nursery:
    """The process that forks; `nursery` starts one.  `emulated`: the release of CANN that ranks have torch_npu over."""

    process: "subprocess.Popen[bytes]"
    emulated: str | None = None

    def outcomes(self, function: Callable[..., Any], *, ranks: int, limit: float = 150, **given: Any) -> list[Outcome]:
        """What `function(member, **given)` gave on each rank; `function` is one of a module, not a lambda."""
        assert self.process.stdin and self.process.stdout
        _say((self.emulated, pickle.dumps((function, ranks, limit, given))), self.process.stdin)
        found: list[Outcome] = pickle.loads(pickle.load(self.process.stdout))
        return found

    def run(self, function: Callable[..., Any], *, ranks: int, limit: float = 150, **given: Any) -> list[Any]:
        """What it returned on each rank; raises `AssertionError` where a rank did not."""
        found = self.outcomes(function, ranks=ranks, limit=limit, **given)
        for rank, outcome in enumerate(found):
            assert outcome.error is None, f"rank {rank}: {outcome.error}"
        return [outcome.value for outcome in found]


@contextmanager
def nursery() -> Iterator[Nursery]:
    """A process to fork from."""
    command = [sys.executable, "-c", "from tests.processes import main; main()"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)  # type: ignore[call-overload]
    try:
        yield Nursery(process)
    finally:
        process.stdin.close()  # it ends at the end of its input
        process.stdout.close()
        process.wait(60)


# --- in the process that forks -------------------------------------------------


@frozen
class _Child:
    process: int
    pipe: int
    begun: float = field(factory=time.monotonic)

    def outcome(self, said: bytes) -> Outcome:
        """After its end: what it wrote, or how it ended."""
        _, status = os.waitpid(self.process, 0)
        os.close(self.pipe)
        seconds = time.monotonic() - self.begun
        if said:
            value, error = pickle.loads(said)
            return Outcome(self.process, seconds, value, error)
        return Outcome(self.process, seconds, error=f"ended with status {os.waitstatus_to_exitcode(status)}")


def _fork(function: Callable[..., Any], member: Member, given: dict[str, Any]) -> _Child:
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return _Child(process, reading)
    os.environ["LOCAL_RANK"] = str(member.rank)  # as torchrun does
    try:
        said = pickle.dumps((function(member, **given), None))
    except BaseException:
        said = pickle.dumps((None, traceback.format_exc()))
    with open(writing, "wb") as pipe:
        pipe.write(said)
    os._exit(0)


def _group(function: Callable[..., Any], ranks: int, limit: float, given: dict[str, Any]) -> list[Outcome]:
    """Fork the ranks, read what they write until all have ended or the time is up."""
    with tempfile.TemporaryDirectory() as folder, selectors.DefaultSelector() as selector:
        children = [_fork(function, Member(rank, ranks, f"{folder}/store"), given) for rank in range(ranks)]
        said = {child.process: b"" for child in children}
        for child in children:
            selector.register(child.pipe, selectors.EVENT_READ, child)
        end = time.monotonic() + limit
        while selector.get_map():
            ready = selector.select(max(0.0, end - time.monotonic()))
            if not ready:
                for key in selector.get_map().values():
                    os.kill(key.data.process, signal.SIGKILL)
                end = time.monotonic() + 60  # their pipes close, as those of all who end
            for key, _ in ready:
                if piece := os.read(key.fd, 1 << 20):
                    said[key.data.process] += piece
                else:
                    selector.unregister(key.fd)
        return [child.outcome(said[child.process]) for child in children]


def _say(what: Any, to: BinaryIO) -> None:
    pickle.dump(what, to)
    to.flush()


@frozen
class _Other:
    """A process that has loaded more, and forks too."""

    process: int
    jobs: BinaryIO
    answers: BinaryIO

    def asked(self, job: tuple[str | None, bytes]) -> bytes:
        """What it answers, as it comes."""
        _say(job, self.jobs)
        answer: bytes = pickle.load(self.answers)
        return answer

    def end(self) -> None:
        """At the end of its input."""
        self.jobs.close()
        os.waitpid(self.process, 0)


def _other(emulated: str) -> _Other:
    (reading, jobs), (answers, writing) = os.pipe(), os.pipe()
    process = os.fork()
    if process:
        os.close(reading)
        os.close(writing)
        return _Other(process, os.fdopen(jobs, "wb"), os.fdopen(answers, "rb"))
    os.close(jobs)
    os.close(answers)
    try:
        from mla_fx.backends.ascend import emulator

        emulator.load(cann=emulated)
        _serve(os.fdopen(reading, "rb"), os.fdopen(writing, "wb"), emulated)
    finally:
        os._exit(0)


def _serve(jobs: BinaryIO, answers: BinaryIO, loaded: str | None = None) -> None:
    """Until the input ends; `loaded`: what this process emulates."""
    torch.set_num_threads(1)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    gc.freeze()  # what is here stays shared: a collection in a child would copy it all
    others: dict[str, _Other] = {}
    while True:
        try:
            emulated, job = pickle.load(jobs)
        except EOFError:
            break
        if emulated == loaded:
            _say(pickle.dumps(_group(*pickle.loads(job))), answers)
        else:
            other = others.get(emulated) or others.setdefault(emulated, _other(emulated))
            _say(other.asked((emulated, job)), answers)
    for other in others.values():
        other.end()


def main() -> None:
    """Load, then fork on demand."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no answer
    for name in ("cpu", "reference"):
        backends.get(name)  # each loads its modules when it is asked for
    _serve(sys.stdin.buffer, answers)
