"""Small programs for sessions, and the public faults of captured graphs, each rebuilt as a session by hand."""

from attrs import evolve, frozen

from mla_fx.effects import (
    Capture,
    Fill,
    Member,
    Program,
    Read,
    Replay,
    Reserve,
    Session,
    Update,
    Value,
    bind,
    in_turn,
    on_host,
    schedule,
    trace,
    turn,
)
from mla_fx.effects.session import Action
from tests.effects.toys import LENGTHS, Asks, Exchange, Lengths, One, Two, X, placed
from tests.effects.toys import Update as Write


def decode(salt: int = 0, asks: type[One] = One) -> Program:
    """A step of decoding in small: an exchange on another stream beside attention over lengths, and a cache."""

    def compute(x: Value, cache: Value, lengths: Value) -> tuple[Value, Value]:
        (query,) = bind(asks(salt + 1), x, names=("query",))
        (received,) = bind(Exchange(salt + 3), query, names=("received",))
        (hist,) = bind(Lengths(salt + 5), query, lengths, names=("hist",))
        (cache,) = bind(Write(salt + 7), cache, hist, names=("cache",))
        (out,) = bind(Two(salt + 9), received, hist, names=("out",))
        return out, cache

    step = trace(compute, "decode", x=X, cache=X, lengths=on_host(LENGTHS))
    return schedule(step, placed({salt + 3: "comm"}))


def member(name: str, salt: int = 0, *, asks: type[One] = One, pool: str = "graphs", room: int = 64) -> Member:
    return Member(name, decode(salt, asks), pool=pool, room=(("workspace", room),))


BIG, SMALL, EAGER = member("big"), member("small", 20), member("eager", 40, pool="")
SHARED = (("big.cache", "small.cache", "eager.cache"),)
RESERVE = Reserve("workspace", 64)
BIG_TURN, SMALL_TURN = turn(BIG, captured=True), turn(SMALL, captured=True)


def session(*actions: Action, members: tuple[Member, ...] = (BIG, SMALL, EAGER)) -> Session:
    names = {f"{one.name}.cache" for one in members}
    return Session(members, actions, (tuple(name for name in SHARED[0] if name in names),))


def filled(name: str) -> tuple[Action, ...]:
    return Update(name, "hist"), Fill(name)


@frozen
class Fault:
    """A session that breaks a rule, and the same session mended."""

    rule: int
    broken: Session
    mended: Session


_WAITING = member("big", asks=Asks)
_LARGE = evolve(EAGER, room=(("workspace", 128),))
_TWO_IN_ONE = tuple(evolve(one, staging="staging", room=(*one.room, ("staging", 16))) for one in (BIG, SMALL))
_STAGED = (RESERVE, Reserve("staging", 16), Capture("big"), Capture("small"))
_BOTH = (RESERVE, Capture("big"), Capture("small"))


def _large_run(*before: Action) -> Session:
    actions = (*before, Capture("big"), *turn(_LARGE, captured=False), *BIG_TURN)
    return session(*actions, members=(BIG, _LARGE))


#: The public faults; what stands behind each name is in the comment above it.
FAULTS: dict[str, Fault] = {
    # vLLM PR #45487: the buffers of the all-to-all came from a workspace, which a larger step after the capture grew;
    # the graphs went on to use the freed one.
    "exchange buffers freed after capture": Fault(10, _large_run(RESERVE), _large_run(Reserve("workspace", 128))),
    # The same, where the buffers are let go of behind the capture and no pool holds them.
    "exchange buffers in no pool": Fault(
        7,
        session(RESERVE, Capture("big"), *BIG_TURN, members=(member("big", pool=""),)),
        session(RESERVE, Capture("big"), *BIG_TURN, members=(BIG,)),
    ),
    # Graphs of two sizes over staging memory that is one.
    "graphs that recycle staging memory": Fault(
        7,
        session(
            *(*_STAGED, *filled("big"), *filled("small"), Replay("big"), Replay("small")),
            *(Read("big", "out"), Read("small", "out")),
            members=_TWO_IN_ONE,
        ),
        session(*_STAGED, *in_turn([BIG_TURN, SMALL_TURN]), members=_TWO_IN_ONE),
    ),
    # The same of what graphs give: the first captured has passing values where the second has its output.
    "graphs that recycle outputs": Fault(
        8,
        session(
            *(*_BOTH, *filled("small"), Replay("small"), *filled("big"), Replay("big")),
            *(Read("small", "out"), Read("big", "out")),
            members=(BIG, SMALL),
        ),
        session(*_BOTH, *in_turn([SMALL_TURN, BIG_TURN]), members=(BIG, SMALL)),
    ),
    # vLLM PR #53818: a workspace keyed by stream, made for the stream of the warm-up and none for the capture's.
    "workspace keyed by stream": Fault(
        10,
        session(Reserve("workspace_of_main", 64), Capture("big"), *BIG_TURN, members=(BIG,)),
        session(RESERVE, Capture("big"), *BIG_TURN, members=(BIG,)),
    ),
    "forgotten task update": Fault(
        9,
        session(RESERVE, Capture("big"), *BIG_TURN, Fill("big"), Replay("big"), Read("big", "out"), members=(BIG,)),
        session(RESERVE, Capture("big"), *in_turn([BIG_TURN, BIG_TURN]), members=(BIG,)),
    ),
    # vllm-ascend PR #14126: a rule that looks at lengths on the host, to leave out empty shards, inside a capture.
    "branch on empty shards": Fault(
        11,
        session(RESERVE, Capture("big"), *BIG_TURN, members=(_WAITING,)),
        session(RESERVE, Capture("big"), *BIG_TURN, members=(BIG,)),
    ),
}
