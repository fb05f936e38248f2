"""What happens when a rank of a group does not come: every other fails, soon, and says which one was lost, and why.

A process that waits for others waits in slices.  Between two it looks at the
board (`mla_fx.backends.board`):

    somebody has said that it failed    it is named with its error, at once
    the transport has failed            who has been silent since is named, after a quarter of the time-out
    the time-out is over                who has been silent for half of it is named, else who is behind the others

and tells the others what it found, so that all name the same one.  A rank that
is slow, but comes within the time-out, changes nothing.
"""

import atexit
import ctypes
import hashlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import define, evolve, field

from mla_fx.backends.board import Board, Notice, Place
from mla_fx.effects import InputError, Launch

#: How long a process waits for a collective before it looks at the board, each time.
_SLICE: Final = timedelta(milliseconds=50)
#: The longest text of an error that others are told, and of a value that is compared as it is.
_LONGEST: Final = 600
_SHORT: Final = 80


#: Why a rank is lost that Ctrl-C, a signal or an exit has ended.
STOPPED: Final = "it was stopped"


class PeerError(RuntimeError):
    """Another rank was lost: `ranks` are those, `why` is what is known of them, `where` is what they did not come to.

    The group is of no use any more, and states may have been written.  `ranks` is empty where the transport has failed
    and everybody is there.
    """

    def __init__(self, ranks: Iterable[int], why: str, where: str = "") -> None:
        self.ranks, self.why, self.where = tuple(ranks), why, where
        super().__init__(f"{where}: " * bool(where) + f"lost {_who(self.ranks)}: {why}")

    def at(self, where: str | Launch) -> "PeerError":
        """The same, of what the ranks did not come to."""
        return PeerError(self.ranks, self.why, where if isinstance(where, str) else _where(where))

    def __reduce__(self) -> Any:
        return PeerError, (self.ranks, self.why, self.where)


def _who(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "the group"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _where(launch: Launch) -> str:
    """A collective, by layer, op and group."""
    where = f"{launch.op.name} over {launch.op.group_of()}"
    return f"{launch.tag}, {where}" if launch.tag else where


def _stop(place: Place) -> str:
    step, collective = place
    if step < 0:
        return "no step"
    return f"collective {collective} of step {step}" if collective else f"the start of step {step}"


@define(eq=False)
class Peers:
    """What this process knows of the other processes of a group, and tells them; one for each group."""

    group: Any
    board: Board
    keeper: int | None  # the rank whose process holds the store, where it is one of theirs
    #: The collectives of the step that runs, for errors that come up where the host waits for its device.
    collectives: tuple[Launch, ...] = field(default=(), init=False)
    _said: Notice | None = field(default=None, init=False)

    @classmethod
    def of(cls, group: Any, *, timeout: float | None = None) -> "Peers":
        """Those of a group, made with their board when they are first asked for; the `timeout` is the group's own."""
        name = group.group_name
        found = _HERE.get(name)
        if found is None or found.group is not group:
            _MADE[name] += 1  # a group that is made anew may have the store of the one before
            store = dist.distributed_c10d.PrefixStore(f"mla_fx/{_MADE[name]}", group.get_group_store().clone())
            board = Board(store, dist.get_rank(group), dist.get_world_size(group), timeout or _timeout(group))
            found = _HERE[name] = cls(group, board, _keeper(group))
            atexit.register(found.leave)
        return found

    # --- what this process does -----------------------------------------------------

    @contextmanager
    def step(self, collectives: tuple[Launch, ...] = ()) -> Iterator[None]:
        """What is done in here all ranks do; with these collectives.  Who fails in here tells the others."""
        self.collectives = collectives
        self.board.collective = 0
        self.board.step += 1
        try:
            yield
        except BaseException as error:
            if isinstance(error, RuntimeError) and re.search("hccl|nccl", str(error), re.IGNORECASE):
                self._named(error)
            self.failed(error)
            raise

    @contextmanager
    def making(self, what: str) -> Iterator[None]:
        """All ranks make something in here, which waits for the others by itself, and raises `RuntimeError`."""
        with self.step(), self.listening() as end:
            self.board.collective += 1
            try:
                yield
            except RuntimeError as error:
                raise self._lost(end, str(error)).at(what) from None

    def meet(self, work: Any, where: str = "") -> None:
        """A collective of hosts has been issued: wait for it.  `where` is for errors, until a launch is known."""
        try:
            work.wait(_SLICE)
        except RuntimeError:
            try:
                self._wait(work)
            except PeerError as error:
                raise error.at(where) from None

    def failed(self, error: BaseException) -> None:
        """This process gives up its step: tell the others, unless it is for one of them."""
        _let_run_out()
        if not isinstance(error, PeerError):
            stopped = isinstance(error, KeyboardInterrupt | SystemExit)
            why = STOPPED if stopped else f"it raised {type(error).__name__}: {error}"
            self._tell((self.board.rank,), why[:_LONGEST])

    def leave(self) -> None:
        """This process takes part in nothing any more: tell the others, for good."""
        if self.board.closed:
            return
        said, place = self._said, self.board.place
        if said is None or said.place[0] != place[0]:
            said = Notice(self.board.rank, place, (self.board.rank,), "it has left the group")
        self.board.say(evolve(said, place=place, lasting=True))
        self.board.close()

    def agree(self, where: str, stated: Mapping[str, object]) -> None:
        """See `Backend.agree`; part of a step."""
        texts = self._gathered(where, json.dumps({name: _short(str(value)) for name, value in stated.items()}))
        by_rank = [json.loads(text) for text in texts]
        for name in dict.fromkeys(name for said in by_rank for name in said):
            saying: dict[str, list[int]] = {}
            for rank, said in enumerate(by_rank):
                saying.setdefault(said.get(name, "nothing"), []).append(rank)
            if len(saying) > 1:
                got = "; ".join(f"{value} on {_who(tuple(ranks))}" for value, ranks in saying.items())
                raise InputError(f"{name}: must be the same on all ranks of the group: got {got}")

    # --- how it waits -----------------------------------------------------------------

    @contextmanager
    def listening(self) -> Iterator[float]:
        """What is done in here waits for others; gives the time at which it must end."""
        self.board.listen(True)
        try:
            yield time.monotonic() + self.board.timeout
        finally:
            self.board.listen(False)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The host waits in here for what its device computes, and so for others.

        Where the device's transport fails, whoever was lost is named; which collective its device was in is not known.
        Where a rank was lost and the transport does not fail in time, the process is ended: nothing else ends the wait.
        """
        board, began = self.board, time.monotonic()
        board.began, board.waiting, board.overdue = began, True, self._end
        try:
            yield
        except RuntimeError as error:
            self._named(error, late=time.monotonic() > began + 0.75 * board.timeout)
            raise
        finally:
            board.waiting, board.overdue = False, None

    def _named(self, error: RuntimeError, *, late: bool = False) -> None:
        """Raise `PeerError` where a device has failed because a rank was lost; what it says itself need not tell.

        `late`: it may have failed because the time of its transport was up.
        """
        if isinstance(error, PeerError):
            return
        with self.listening():
            half = self.board.timeout / 2
            found = self._verdict(time.monotonic() + half, str(error), patience=half / 2, behind=late)
        if found.ranks:
            self._tell(found.ranks, found.why)
            raise found.at(self._reached(found.ranks)) from None

    def _end(self) -> None:
        """The time is up, and the host still waits for its device, as for a transport with a time-out of its own."""
        found = self._verdict(0.0, "", patience=self.board.timeout / 2)
        if found.ranks:
            print(f"{type(found).__name__}: {found.at(self._reached(found.ranks))}", file=sys.stderr, flush=True)
            os._exit(1)

    def _reached(self, ranks: tuple[int, ...]) -> str:
        """Up to where these ranks are known to have come."""
        step, collective = min((self.board.heard[rank].place for rank in ranks), default=(-1, 0))
        at = collective if step == self.board.step else 0
        if at >= len(self.collectives):
            return "a collective"
        return f"{_where(self.collectives[at])} or one behind it"

    def _wait(self, work: Any) -> None:
        """For a collective that does not come at once."""
        with self.listening() as end:
            while not work.is_completed():
                self._look(end)
                try:
                    work.wait(_SLICE)
                except RuntimeError:
                    continue
                return
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(end, str(error)) from None

    def _look(self, end: float) -> None:
        """Raise `PeerError` where it is in vain to wait on, or the time is up."""
        if self._told() is not None or time.monotonic() > end:
            raise self._lost(end)

    def _told(self) -> Notice | None:
        """What somebody has said that this process waits for in vain."""
        place = self.board.place
        others = (heard.notice for rank, heard in enumerate(self.board.heard) if rank != self.board.rank)
        concern = [said for said in others if said is not None and said.concerns(place)]
        return min(concern, key=lambda said: said.place, default=None)

    def _lost(self, end: float, broken: str = "") -> PeerError:
        """Who was lost, told to all; `broken` is what the transport said."""
        half = self.board.timeout / 2  # after so long, a transport that fails may have run out of time itself
        error = self._verdict(end, broken, patience=half / 2 if broken and time.monotonic() < end - half else half)
        self._tell(error.ranks, error.why)
        _let_run_out()
        return error

    def _verdict(self, end: float, broken: str, *, patience: float, behind: bool = True) -> PeerError:
        """Who was lost, as soon as that is clear: who is silent for `patience` seconds, after `end` who is `behind`."""
        board = self.board
        while (said := self._told()) is None:
            if board.unanswered() > patience:
                return self._storeless(board.unanswered())
            others = (rank for rank in range(board.ranks) if rank != board.rank)
            silent = {rank: silence for rank in others if (silence := board.silence(rank)) > patience}
            if silent:
                return PeerError(silent, f"not heard of for {min(silent.values()):.1f} s: dead or stopped")
            if time.monotonic() > end:
                return self._behind(broken) if behind else PeerError((), broken)
            time.sleep(0.01)
        return PeerError(said.ranks, said.why)

    def _storeless(self, silence: float) -> PeerError:
        """Nobody can be asked."""
        if self.keeper is None:
            return PeerError((), f"its store has not answered for {silence:.1f} s")
        return PeerError((self.keeper,), f"the store, which it holds, has not answered for {silence:.1f} s")

    def _behind(self, broken: str) -> PeerError:
        """Who has come less far than all others."""
        places = {rank: heard.place for rank, heard in enumerate(self.board.heard) if rank != self.board.rank}
        last = min(places.values(), default=self.board.place)
        if last >= self.board.place:
            return PeerError((), broken or "everybody is there, and the transport does not bring what was sent")
        behind = [rank for rank, place in places.items() if place == last]
        waited = f"after {self.board.timeout:g} s it has come to {_stop(last)}, others to {_stop(self.board.place)}"
        return PeerError(behind, f"{waited}: it hangs, or is too slow")

    def _tell(self, ranks: Iterable[int], why: str) -> None:
        self._said = Notice(self.board.rank, self.board.place, tuple(ranks), why)
        self.board.say(self._said)

    def _gathered(self, where: str, text: str) -> list[bytes]:
        """What each rank says, by the store."""
        self.board.collective += 1
        board, pause = self.board, 0.001
        keys = [f"{board.step}.{board.collective}/{rank}" for rank in range(board.ranks)]
        try:
            with self.listening() as end:
                board.ask(partial(board.store.set, keys[board.rank], text), board.timeout)
                while not board.ask(partial(board.store.check, keys), board.timeout):
                    self._look(end)
                    time.sleep(pause)
                    pause = min(2 * pause, 0.05)
                found: list[bytes] = board.ask(partial(board.store.multi_get, keys), board.timeout)
                return found
        except PeerError as error:
            raise error.at(where) from None
        except TimeoutError:
            raise self._storeless(board.timeout).at(where) from None


#: By the name of the group; and how many have been made of that name.
_HERE: Final[dict[str, Peers]] = {}
_MADE: Final[Counter[str]] = Counter()


def _short(text: str) -> str:
    return text if len(text) <= _SHORT else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _timeout(group: Any) -> float:
    """Of the collectives of a group, in seconds."""
    for kind in ("cpu", "npu", "cuda"):
        try:
            found: timedelta = group._get_backend(torch.device(kind)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        return found.total_seconds()
    return 1800.0


def _keeper(group: Any) -> int | None:
    """The rank that holds the store of a group: 0 of all, unless it is a file, or with whoever started them."""
    store = group.get_group_store()
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    held = isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]
    if not held or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    members = dist.get_process_group_ranks(group)
    return members.index(0) if 0 in members else None


def _let_run_out() -> None:
    """Never wait for what the groups of this process still have to do.

    gloo cannot be told to give up a collective, and the end of a group, as at the end of the process, waits for it.
    In torch 2.13 `abort` and `shutdown` of a gloo group return at once and change nothing: behind both, with a
    collective that a rank never came to, the last reference to the group still waited.  So one is kept for good.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
