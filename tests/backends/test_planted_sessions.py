"""Faults that are planted in the law of a session, one at a time, and seen on the hostile machine.

Every fault has an example that shows it.  Without the fault the law and the
machine agree on all of them: what is accepted is right, what is refused is wrong.
"""

from collections.abc import Callable
from importlib import import_module

import pytest
from attrs import evolve

from mla_fx.effects import (
    MAIN,
    Capture,
    Fill,
    Member,
    Read,
    Record,
    Release,
    Replay,
    Session,
    Wait,
    bind,
    in_turn,
    schedule,
    session_violations,
    turn,
)
from tests.backends.test_sessions import verdict_holds
from tests.effects import toys
from tests.effects.sessions import BIG, BIG_TURN, FAULTS, RESERVE, filled, member, session

LAW, MEMORY = (import_module(f"mla_fx.effects.{name}") for name in ("check_session", "session_memory"))
CHECKER = LAW._Checker


def plain(name: str, pool: str) -> Member:
    """A program of two launches, which shares nothing but its pool."""
    made = toys.step_of(lambda x: bind(toys.One(3), *bind(toys.One(1), x)), "x")
    return Member(name, schedule(made, lambda equation: MAIN), pool=pool)


def aside(left: str, right: str) -> Session:
    """Two programs, the first on another stream, and nothing that waits for it but its own read."""
    pair = (plain("a", left), plain("b", right))
    there, back = ((Record(one, event), Wait(other, event)) for one, other, event in
                   ((MAIN, "other", "there"), ("other", MAIN, "back")))  # fmt: skip
    outputs = [Read(one.name, one.program.outputs[0]) for one in pair]
    return Session(
        pair,
        (
            *(Capture("a"), Capture("b"), Fill("a"), Fill("b")),
            *there,
            *(Replay("a", "other"), Replay("b")),
            *back,
            *outputs,
        ),
    )


#: One after the other on two streams, over two pools: legal, by what waits.
_OTHER = tuple(evolve(action, stream="other") if isinstance(action, Replay) else action for action in BIG_TURN)
_AT = _OTHER.index(Replay("big", "other"))
JOINED = session(
    *(RESERVE, Capture("big")),
    *in_turn(
        [(*_OTHER[:_AT], Record(MAIN, "there"), Wait("other", "there"), _OTHER[_AT], Record("other", "back"),
          Wait(MAIN, "back"), *_OTHER[_AT + 1 :])] * 2
    ),
    members=(BIG,),
)  # fmt: skip
#: The second update is not ordered behind the first replay.
EARLY = session(
    *(RESERVE, Capture("big"), *filled("big"), Replay("big"), Read("big", "out")),
    *(*filled("big"), Replay("big"), Read("big", "out")),
    members=(BIG,),
)
RELEASED = session(RESERVE, Capture("big"), *BIG_TURN, Release("big"), Read("big", "out"), members=(BIG,))
#: What big and small share but the pool: a cache, a workspace, collectives.
SHARING = tuple(evolve(member(name, salt), pool=name) for name, salt in (("big", 0), ("small", 20)))
UNORDERED = session(
    *(RESERVE, Capture("big"), Capture("small"), *filled("big"), *filled("small")),
    *(Record(MAIN, "there"), Wait("other", "there"), Replay("big", "other"), Replay("small")),
    *(Record("other", "back"), Wait(MAIN, "back"), Read("big", "out"), Read("small", "out")),
    members=SHARING,
)
STALE = session(
    *(RESERVE, Capture("big"), Capture("small")),
    *in_turn([BIG_TURN, turn(SHARING[1], captured=True)]),
    Read("big", "cache_1"),
    members=SHARING,
)
BROKEN = {name: fault.broken for name, fault in FAULTS.items()}
EXAMPLES = {
    **BROKEN,
    **{f"{name}, mended": fault.mended for name, fault in FAULTS.items()},
    **{"one pool": aside("left", "left"), "two pools": aside("left", "right")},
    **{"joined": JOINED, "early": EARLY, "released": RELEASED, "unordered": UNORDERED, "stale": STALE},
}

Fault = Callable[[pytest.MonkeyPatch], None]


def nothing(owner: object, name: str, value: object = None) -> Fault:
    """A method of the law that does nothing, and always says the same."""
    return lambda patch: patch.setattr(owner, name, lambda *arguments, **named: value)


def _replays_forgotten(patch: pytest.MonkeyPatch) -> None:
    update = CHECKER.update

    def forgets(self: object, action: object) -> None:
        for captured in self.captures.values():
            captured.replays = []
        update(self, action)

    patch.setattr(CHECKER, "update", forgets)


def _release_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CHECKER, "release", lambda self, action, captured: self.captures.pop(action.member))


def _without(patch: pytest.MonkeyPatch, **changed: object) -> None:
    facts_of = MEMORY.facts_of
    patch.setattr(LAW, "facts_of", lambda *arguments: evolve(facts_of(*arguments), **changed))


def _later_taken(patch: pytest.MonkeyPatch) -> None:
    """Whoever was captured later may write what was captured before, and not the other way round."""
    asked = MEMORY.Content.may_be_written

    def turned(self: object, use: object) -> bool:
        if isinstance(self.where, tuple) or use.life is None:
            return asked(self, use)
        return self.life.shares(use.life) and use.life.taken > self.life.taken

    patch.setattr(MEMORY.Content, "may_be_written", turned)


#: What is planted, and the example that shows it.
PLANTED: dict[str, tuple[Fault, str]] = {
    "1 inputs and staging are not looked at": (nothing(CHECKER, "static"), "graphs that recycle staging memory"),
    "2 and 6 nothing is beside anything": (nothing(CHECKER, "beside"), "unordered"),
    "2 nothing replaces a state": (nothing(CHECKER, "spoil"), "stale"),
    "4 waits give no order": (nothing(LAW, "see"), "joined"),
    "7 operators take no memory": (lambda patch: _without(patch, streams=frozenset()), "exchange buffers in no pool"),
    "7 what is released is still there": (_release_forgotten, "released"),
    "8 no memory is shared": (nothing(MEMORY.Life, "shares", False), "graphs that recycle outputs"),
    "8 all memory is shared": (nothing(MEMORY.Life, "shares", True), "two pools"),
    "8 replays may overlap": (nothing(MEMORY.Life, "may_be", False), "one pool"),
    "8 who was captured first is turned round": (_later_taken, "graphs that recycle outputs"),
    "9 updates are not counted": (nothing(CHECKER, "updated"), "forgotten task update"),
    "9 updates are not ordered": (_replays_forgotten, "early"),
    "10 buffers may grow": (nothing(CHECKER, "same_buffers"), "exchange buffers freed after capture"),
    "10 workspaces are not known": (lambda patch: _without(patch, workspaces=()), "workspace keyed by stream"),
    "11 whoever waits may be captured": (nothing(CHECKER, "program"), "branch on empty shards"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_law_and_machine_agree_on_the_examples(name):
    refused = name in BROKEN or name in ("one pool", "early", "released", "unordered", "stale")
    assert verdict_holds(EXAMPLES[name]) == ("refused" if refused else "accepted")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_seen(name, monkeypatch):
    fault, example = PLANTED[name]
    before = session_violations(EXAMPLES[example])
    fault(monkeypatch)
    assert bool(session_violations(EXAMPLES[example])) != bool(before)
    with pytest.raises(AssertionError, match=r"wrong under seed|never wrong"):
        verdict_holds(EXAMPLES[example], range(100))
