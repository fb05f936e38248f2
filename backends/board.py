"""A board beside a group of processes, on the group's own store: who is alive, how far it is, what it failed of.

Every process has one thread for it, which

    beats      writes that it lives, and how far the process is, every twentieth of the time-out
    listens    while the process waits for others: reads their beats, and at once what they have to say
    asks       does all that the process wants of the store

No other thread touches the store, so a store that does not answer (the process
that holds it may be the one that was lost) holds nobody up: whoever wants
something of the board waits for an answer no longer than it says.

How far a process is, its place, is two integers in memory, which the thread
that issues collectives writes: the number of its step, and how many collectives
of that it has entered.  Ranks issue the same collectives in the same order, so
places compare; they cost a launch nothing else.

What a rank says, a notice, has its place: it will not come further in that
step, or, `lasting`, not in any.  So what all ranks refuse alike holds up none
of them when they go on to the next step.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

from attrs import asdict, define, field, frozen

#: Step, and collectives of it that have been entered.
Place = tuple[int, int]

#: While the process waits: how often it asks whether somebody has said something, in seconds.
_LISTENING: Final = 0.05


@frozen
class Notice:
    """What a rank says before it fails: how far it is, whose fault it is, and why."""

    rank: int
    place: Place
    ranks: tuple[int, ...]
    why: str
    lasting: bool = False

    def concerns(self, place: Place) -> bool:
        """Whether one that waits at `place` waits in vain: for this rank, or as it did, for another."""
        if not self.lasting and self.place[0] != place[0]:
            return False
        return self.place < place or (self.place == place and self.ranks != (self.rank,))


@define
class Heard:
    """What is known of a rank: `since` when, by this process's clock, its beats that were read have been the same."""

    since: float
    beat: int = -1
    place: Place = (-1, 0)
    notice: Notice | None = None


@define(eq=False)
class _Task:
    do: Callable[[], Any]
    done: threading.Event = field(factory=threading.Event)
    value: Any = None


@define(eq=False)
class Board:
    """See the top of this file.  `store` is this board's alone; `timeout` is in seconds."""

    store: Any
    rank: int
    ranks: int
    timeout: float
    step: int = 0
    collective: int = 0
    waiting: bool = False
    #: What is done, by the thread of the board, when the process still waits a quarter behind its time-out.
    overdue: Callable[[], None] | None = None
    #: By this process's clock: since when it waits, and when the store last answered, and last gave the beats of all.
    began: float = field(factory=time.monotonic)
    answered: float = field(factory=time.monotonic)
    read: float = field(factory=time.monotonic)
    heard: list[Heard] = field(init=False)
    _bell: threading.Event = field(factory=threading.Event, init=False)
    _tasks: "SimpleQueue[_Task]" = field(factory=SimpleQueue, init=False)
    closed: bool = field(default=False, init=False)
    _rung: bytes = field(default=b"0", init=False)
    _thread: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.heard = [Heard(self.answered) for _ in range(self.ranks)]
        self._thread = threading.Thread(target=self._run, name="mla-fx board", daemon=True)
        self._thread.start()

    @property
    def period(self) -> float:
        """Seconds from beat to beat."""
        return self.timeout / 20

    @property
    def place(self) -> Place:
        """How far this process is."""
        return self.step, self.collective

    def listen(self, waiting: bool) -> None:
        """Whether this process waits for others from now on."""
        self.began, self.waiting = time.monotonic(), waiting
        self._bell.set()

    def silence(self, rank: int) -> float:
        """For how long, while this process has waited and read, no beat of a rank has come, in seconds."""
        return self.read - max(self.heard[rank].since, self.began)

    def unanswered(self) -> float:
        """For how long, while this process has waited, the store has not answered, in seconds."""
        return time.monotonic() - max(self.answered, self.began)

    def ask(self, do: Callable[[], Any], limit: float) -> Any:
        """What `do` gives, done by the thread of the board; raises `TimeoutError` after `limit` seconds."""
        task = _Task(do)
        self._tasks.put(task)
        self._bell.set()
        if not task.done.wait(limit):
            raise TimeoutError(f"the store has not answered for {limit:.1f} s")
        if isinstance(task.value, Exception):
            raise task.value
        return task.value

    def say(self, notice: Notice) -> None:
        """Tell the others, or give up when the store does not answer."""

        def write() -> None:
            self.store.set(f"said/{self.rank}", json.dumps(asdict(notice)))
            self.store.add("rung", 1)

        if self._answers():
            with suppress(TimeoutError, RuntimeError):  # who cannot be told learns it as of one that has died
                self.ask(write, self.timeout / 4)

    def close(self) -> None:
        """Beat no more; the thread ends, unless the store holds it."""
        self.closed = True
        self._bell.set()
        self._thread.join(self.timeout / 4 if self._answers() else 0)

    def _answers(self) -> bool:
        """Whether the store has answered lately."""
        return time.monotonic() - self.answered < self.timeout / 4

    # --- in the thread of the board ----------------------------------------------

    def _run(self) -> None:
        beat, due = 0, 0.0
        self._try(lambda: self.store.add("rung", 0))
        while not self.closed:
            self._bell.clear()
            self._work()
            beats = time.monotonic() >= due
            if beats:
                beat, due = beat + 1, time.monotonic() + self.period
                self._try(partial(self.store.set, f"beat/{self.rank}", f"{beat} {self.step} {self.collective}"))
            if self.waiting:
                self._try(partial(self._hear, beats))
                if (overdue := self.overdue) is not None and time.monotonic() > self.began + 1.25 * self.timeout:
                    overdue()
            self._bell.wait(max(0.0, min(due - time.monotonic(), _LISTENING if self.waiting else self.period)))
        self._work()

    def _work(self) -> None:
        while True:
            try:
                task = self._tasks.get_nowait()
            except Empty:
                return
            try:
                task.value = task.do()
                self.answered = time.monotonic()
            except Exception as error:
                task.value = error
            task.done.set()

    def _try(self, do: Callable[[], Any]) -> None:
        """Something of the store, which may have gone; `answered` says since when."""
        with suppress(Exception):
            do()
            self.answered = time.monotonic()

    def _hear(self, beats: bool) -> None:
        """What ranks have to say, if any has rung; and their `beats`."""
        rung = self.store.get("rung")
        if rung != self._rung:
            self._rung = rung
            for rank, heard in enumerate(self.heard):
                if self.store.check([f"said/{rank}"]):
                    heard.notice = _notice(self.store.get(f"said/{rank}"))
        if beats:
            there = [rank for rank in range(self.ranks) if self.heard[rank].beat >= 0 or self._there(rank)]
            texts = self.store.multi_get([f"beat/{rank}" for rank in there])
            self.read = now = time.monotonic()
            for rank, text in zip(there, texts, strict=True):
                beat, step, collective = map(int, text.split())
                if beat != self.heard[rank].beat:
                    heard = self.heard[rank]
                    heard.place, heard.since, heard.beat = (step, collective), now, beat

    def _there(self, rank: int) -> bool:
        found: bool = self.store.check([f"beat/{rank}"])
        return found


def _notice(text: bytes) -> Notice:
    said = json.loads(text)
    return Notice(said["rank"], tuple(said["place"]), tuple(said["ranks"]), said["why"], said["lasting"])
