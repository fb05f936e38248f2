"""Sessions: the life of several programs over one memory, as a value.

A session is a tuple of actions in the order in which the host issues them:

    Reserve   a buffer has this many bytes from here on, a workspace or a staging buffer
    Capture   a program becomes a graph: every value of it has its address from here on; nothing runs
    Fill      one copy into the static inputs of a captured program, outside its graph
    Update    the host operands of one launch are set for the next replay
    Replay    a captured program runs
    Run       a program runs eagerly, on main
    Read      an output is read
    Drop      the host lets go of an output, or of a static input, "member.value"
    Release   a captured program is destroyed, and its outputs with it
    Record    an event happens when the stream has done all that was issued to it so far
    Wait      what is issued to the stream from here on runs after the event

As in a program, what runs when is decided by streams and events only.  A
replay follows what its stream was given before, and the stream goes on when
the program has joined; its own streams are the graph's.  Each updatable launch
follows its update, whichever stream that is on, and waits for no other one.

What is shared has a name.  A pool is memory that captures (and runs) take
from: what a program lets go of, and at the end of a capture or a run all but
its outputs, is free in the pool for whoever takes from it next on the same
stream.  What is freed in no pool is anybody's, outside of the session too.
Workspaces, staging buffers and streams are shared by their names, inputs where
`Session.shared` says so.  What is staged or data to a captured program lies in
static buffers, which `Fill` fills: a graph has no `Stage`.  An operand of dtype
"host" that is not fixed makes a launch updatable; nothing else does.
"""

from collections.abc import Iterable, Iterator, Sequence

from attrs import evolve, frozen

from mla_fx.effects.program import MAIN, Drop, Program, Record, Wait

#: An input that a fill or a run takes from an output, "member.output".
Taken = tuple[str, str]


@frozen
class Member:
    """A program of a session, by name.

    `pool` is where its values lie, "" for memory that is anybody's again when it is let go.  `staging` is the buffer
    that its static inputs lie in, "" for one of its own.  `room` says how many bytes it asks of buffers, as in
    (("workspace", 4096),).
    """

    name: str
    program: Program
    pool: str = ""
    staging: str = ""
    room: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        notes = [f"pool {self.pool}"] if self.pool else []
        notes += [f"staging {self.staging}"] if self.staging else []
        notes += [f"asks {size} of {buffer}" for buffer, size in self.room]
        return "    ".join([f"{self.name}: {self.program.name}", ", ".join(notes)]).rstrip()


@frozen
class Reserve:
    """Give `buffer` at least `size` bytes."""

    buffer: str
    size: int

    def __str__(self) -> str:
        return f"reserve {self.buffer} {self.size}"


@frozen
class Capture:
    """Capture `member`."""

    member: str

    def __str__(self) -> str:
        return f"capture {self.member}"


@frozen
class Fill:
    """Fill all static inputs of `member`: from outputs where `takes` says so, else from what the caller gives."""

    member: str
    takes: tuple[Taken, ...] = ()
    stream: str = MAIN

    def __str__(self) -> str:
        return f"fill {self.member}{_takes(self.takes)}"


@frozen
class Update:
    """Set the host operands of `launch` of `member`, named by its first result, for the next replay."""

    member: str
    launch: str
    stream: str = "update"

    def __str__(self) -> str:
        return f"update {self.member}.{self.launch}"


@frozen
class Replay:
    """Replay `member`."""

    member: str
    stream: str = MAIN

    def __str__(self) -> str:
        return f"replay {self.member}"


@frozen
class Run:
    """Run `member` eagerly on main.  Its outputs stay until it runs again."""

    member: str
    takes: tuple[Taken, ...] = ()

    def __str__(self) -> str:
        return f"run {self.member}{_takes(self.takes)}"


@frozen
class Read:
    """Read `output` of `member`: what its last replay or run gave."""

    member: str
    output: str
    stream: str = MAIN

    def __str__(self) -> str:
        return f"read {self.member}.{self.output}"


@frozen
class Release:
    """Destroy the capture of `member`."""

    member: str

    def __str__(self) -> str:
        return f"release {self.member}"


Action = Reserve | Capture | Fill | Update | Replay | Run | Read | Drop | Release | Record | Wait


def _takes(takes: tuple[Taken, ...]) -> str:
    return "".join(f"    {put} from {output}" for put, output in takes)


def stream_of_action(action: Action) -> str | None:
    """The stream that an action is issued to; None for what is the host's alone."""
    match action:
        case Fill() | Update() | Replay() | Read() | Record() | Wait():
            return action.stream
        case Run():
            return MAIN
    return None


@frozen
class Session:
    """Programs by name, what the host does with them, and which of their inputs are one memory.

    `shared` has a tuple for each memory that several inputs are, as in (("decode8.cache", "decode4.cache"),).  What
    stands there, and what a program writes, is state: it is neither filled nor anybody's output.
    """

    members: tuple[Member, ...]
    actions: tuple[Action, ...]
    shared: tuple[tuple[str, ...], ...] = ()

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)

    def __str__(self) -> str:
        head = ["session", *(f"  {member}" for member in self.members)]
        head += [f"  one memory: {' '.join(names)}" for names in self.shared]
        shown = [(stream_of_action(action) or "host", action) for action in self.actions]
        width = max(map(len, (MAIN, *(stream for stream, _ in shown))))
        return "\n".join([*head, *(f"{stream:<{width}}  {action}" for stream, action in shown)])


def turn(member: Member, *, captured: bool) -> tuple[Action, ...]:
    """One turn of a program alone: run it, or update, fill and replay it; then read all outputs.

    Updates follow what main was given before: they write what the replay before reads.
    """
    name, program = member.name, member.program
    reads: tuple[Action, ...] = tuple(Read(name, output) for output in dict.fromkeys(program.outputs))
    if not captured:
        return (Run(name), *reads)
    updates: tuple[Action, ...] = tuple(Update(name, one.results[0]) for one in program.updatable() if one.results)
    if updates:
        updates = (Record(MAIN, "ready"), Wait("update", "ready"), *updates)
    return (*updates, Fill(name), Replay(name), *reads)


def in_turn(turns: Iterable[Sequence[Action]], *, first: int = 0) -> tuple[Action, ...]:
    """The actions of turns one after the other, each with events of its own, numbered from `first`."""
    return tuple(action for number, actions in enumerate(turns, first) for action in _own_events(actions, number))


def every_order(turns: Sequence[Sequence[Action]], *, known: int = 0) -> tuple[Action, ...]:
    """Actions in which each of these turns comes right behind each of them, itself too: n^2 + 1 turns.

    Where a turn reads what it makes before it ends, the law says of them what it says of these turns in any order and
    number: a turn leaves nothing behind but free memory, and updates that are ordered behind the turn before or not.
    Pairs of the `known` first ones, which have been held against the law, are left out.
    """
    pairs = [known + at for at in _every_pair(len(turns) - known)]
    mixed = [at for new in range(known, len(turns)) for old in range(known) for at in (new, old)]
    return in_turn([turns[at] for at in [*pairs, *mixed, *([known] if mixed else [])]])


def _every_pair(size: int) -> list[int]:
    """Numbers below `size`, each next to each once: the Lyndon words of one and two letters in order, and then the
    first letter again."""
    words = [word for first in range(size) for word in [[first], *([first, other] for other in range(first + 1, size))]]
    return [number for word in words for number in word] + ([0] if size else [])


def _own_events(actions: Sequence[Action], number: int) -> Iterator[Action]:
    for action in actions:
        if isinstance(action, Record | Wait):
            action = evolve(action, event=f"{action.event}_{number}")
        yield action
