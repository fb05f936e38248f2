"""What ranks do in tests of what happens when one of them is lost: functions of a member, run by `tests.processes`.

Several groups of four are members of one run, so that they wait side by side.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from mla_fx import backends, orchestrations
from mla_fx.backends import Backend, Collective, PeerError
from mla_fx.effects import InputError, Program, schedule
from tests.backends.ranks import refused
from tests.processes import Member
from tests.setups import Setup

RANKS = 4
CULPRIT = 2
SETUP = Setup(ranks=RANKS, layers=2)


def program() -> Program:
    return schedule(SETUP.step, orchestrations.attention_aside)


class Fault:
    """What befalls the culprit in the `number`-th collective of a step, once it is `armed`."""

    def __init__(self, how: str, number: int, timeout: float) -> None:
        self.how, self.number, self.timeout = how, number, timeout
        self.armed, self.count = False, 0

    def arm(self) -> None:
        self.armed, self.count = True, 0

    def befall(self) -> None:
        self.count += 1
        if not self.armed or self.count != self.number + 1:
            return
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.how == "raises":
            raise ZeroDivisionError("on purpose")
        if self.how == "slow":
            time.sleep(0.6 * self.timeout)
        if self.how == "hangs":
            time.sleep(2 * self.timeout)  # until all others have gone
            os._exit(9)

    def into(self, backend: Backend) -> Backend:
        """A backend all of whose collectives may be befallen."""
        rules = backend.table.rules
        return backend.with_rules({op: self._with(rule) for op, rule in rules.items() if isinstance(rule, Collective)})

    def _with(self, rule: Collective) -> Collective:
        def send(*operands: Any, **given: Any) -> Any:
            self.befall()
            return rule.send(*operands, **given)

        return Collective(send, rule.receive)


@contextmanager
def group_of_four(member: Member, timeout: float) -> Iterator[tuple[Any, int, Path]]:
    """The group that a member is in, its rank there, and a place for what its ranks tell each other."""
    case, rank = divmod(member.rank, RANKS)
    place = Path(f"{member.store}.{case}")
    with backends.join(
        "gloo", timeout=timeout, store=dist.FileStore(str(place), RANKS), rank=rank, ranks=RANKS
    ) as made:
        yield made, rank, place


def told(error: BaseException, begun: float) -> dict[str, Any]:
    """What a rank was told, and after how long."""
    ranks = error.ranks if isinstance(error, PeerError) else None
    return {"kind": type(error).__name__, "text": str(error), "ranks": ranks, "seconds": time.monotonic() - begun}


def lose(member: Member, *, how: str, collectives: list[int], timeout: float, params: list[Any]) -> Any:
    """One good step, and one in which the culprit fails; each group of four in another collective."""
    fault, given = Fault(how, collectives[member.rank // RANKS], timeout), program()
    begun = time.monotonic()
    try:
        with group_of_four(member, timeout) as (group, rank, place):
            backend = backends.get("cpu", ranks=RANKS, group=group)
            if rank == CULPRIT:
                Path(f"{place}.culprit").write_text(str(os.getpid()))
                backend = fault.into(backend)
            run = backend.compile(given, backend.prepare(given, [params[rank]]))
            own = backend.put([[argument[rank]] for argument in SETUP.arguments()], copy=True)
            good = pytree.tree_map(lambda leaf: leaf.clone(), run(*own))
            fault.arm()
            begun = time.monotonic()
            again = run(*own)
            return {"same": all(map(torch.equal, pytree.tree_leaves(good), pytree.tree_leaves(again)))}
    except (PeerError, backends.RunError) as error:
        if member.rank % RANKS == 0 and how == "stopped":
            os.kill(int(Path(f"{place}.culprit").read_text()), signal.SIGKILL)
        return told(error, begun)


def refuse(member: Member, *, params: list[Any], timeout: float) -> list[Any]:
    """A batch that the culprit alone refuses; before that, one that all refuse, and good ones."""
    with group_of_four(member, timeout) as (group, rank, _):
        backend, of = backends.get("cpu", ranks=RANKS, group=group), program()
        run = backend.compile(of, backend.prepare(of, [params[rank]]))
        caches, tokens, batches = backend.put([[argument[rank]] for argument in SETUP.arguments()], copy=True)
        short = [tokens[0][:-1]]
        found = []
        for given in (tokens, short, tokens, short if rank == CULPRIT else tokens):
            begun = time.monotonic()
            try:
                run(caches, given, batches)
                found.append("well")
            except (InputError, PeerError) as error:
                found.append(told(error, begun))
            if given is short and rank == 0:
                time.sleep(timeout / 4)  # the others are well into the next one
        return found


def disagree(member: Member, *, timeout: float) -> list[str]:
    """What all ranks say when one of them states something else, or compiles another program."""
    with group_of_four(member, timeout) as (group, rank, _):
        backend = backends.get("cpu", ranks=RANKS, group=group)
        odd = rank == CULPRIT
        long = "x" * 1000
        backend.agree({"model": long, "layout": "tp=4"})
        others = Setup(ranks=RANKS, tokens=2 if odd else 3)
        calls = [
            lambda: backend.agree({"model": long, "layout": "tp=2" if odd else "tp=4"}),
            lambda: backend.agree({"model": long + "y" if odd else long}),
            lambda: backend.agree({"model": 1, "drafts": 2} if odd else {"model": 1}),
            lambda: others.compiled(backend, schedule(others.step, orchestrations.serial)),
        ]
        return [refused(call) for call in calls]


def elsewhere(member: Member, *, hows: Sequence[str], timeout: float) -> Any:
    """The culprit fails outside of any step, each group of four's in its way: raises, leaves, never makes a backend."""
    begun, how = time.monotonic(), hows[member.rank // RANKS]
    try:
        with group_of_four(member, timeout) as (group, rank, _):
            if rank == CULPRIT and how == "never comes":
                time.sleep(1.5 * timeout)
                return None
            backend = backends.get("cpu", ranks=RANKS, group=group)
            backend.agree({"model": 1})
            if rank == CULPRIT and how == "raises":
                raise ZeroDivisionError("on purpose")
            if rank == CULPRIT:
                return None
            begun = time.monotonic()
            backend.share(rank) if how == "leaves" else backend.agree({"model": 2})
            return "well"
    except (PeerError, ZeroDivisionError) as error:
        return told(error, begun)


def keep_the_store(member: Member, *, hows: Sequence[str], timeout: float) -> Any:
    """Rank 0 of each group of four, whose process holds the store, is killed or stopped, and with it the board."""
    case, rank = divmod(member.rank, RANKS)
    how, member = hows[case], Member(rank, RANKS, f"{member.store}.{case}")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Path(f"{member.store}.keeper").write_text(str(os.getpid()))
        Path(f"{member.store}.port.new").write_text(str(store.port))
        os.rename(f"{member.store}.port.new", f"{member.store}.port")
    else:
        member.hear("port")
        store = dist.TCPStore("127.0.0.1", int(Path(f"{member.store}.port").read_text()), is_master=False)
    begun = time.monotonic()
    try:
        with backends.join("gloo", timeout=timeout, store=store, rank=rank, ranks=RANKS) as group:
            backend = backends.get("cpu", ranks=RANKS, group=group)
            backend.share(0)
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            begun = time.monotonic()
            backend.share(1)
    except PeerError as error:
        found = told(error, begun)
        member.tell(f"{rank} is out")
        if rank == 1:
            for other in range(1, RANKS):
                member.hear(f"{other} is out", 10 * timeout)
            if how == "stopped":
                os.kill(int(Path(f"{member.store}.keeper").read_text()), signal.SIGKILL)
        return {**found, "left": time.monotonic() - begun}
