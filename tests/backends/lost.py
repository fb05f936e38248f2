"""What ranks do in tests of what happens when one of them is lost: functions of a member, run by `tests.processes`.

Several groups of four are members of one run, so that they wait side by side.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from mla_fx import backends, orchestrations
from mla_fx.backends import Backend, Collective, PeerError
from mla_fx.effects import Program, schedule
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
        while self.how == "hangs":
            time.sleep(0.01)  # so that it takes no time from the others

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
        if member.rank % RANKS == 0 and how in ("stopped", "hangs"):
            os.kill(int(Path(f"{place}.culprit").read_text()), signal.SIGKILL)
        return told(error, begun)
