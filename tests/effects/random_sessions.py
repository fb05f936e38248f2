"""Random sessions of up to four small programs: mostly legal, then changed a little."""

from attrs import evolve
from hypothesis import strategies as st

from mla_fx.effects import (
    MAIN,
    Capture,
    Drop,
    Fill,
    Member,
    Read,
    Record,
    Release,
    Replay,
    Reserve,
    Run,
    Session,
    Update,
    Wait,
    in_turn,
    schedule,
    turn,
)
from mla_fx.effects.session import Action
from tests.effects import toys

POOLS = ("left", "left", "left", "right")
ROOM = ("workspace", 64)


@st.composite
def members(draw: st.DrawFn) -> tuple[Member, ...]:
    """One to four programs; those whose pool has a name are captured, and some of the others run over one too."""
    found = []
    for name in "abcd"[: draw(st.integers(1, 4))]:
        program = schedule(draw(toys.steps(4, toys.CAPTURED)), draw(toys.orchestrations(3)))
        staging = draw(st.sampled_from(["", "", "staging"]))
        found.append(Member(name, program, draw(st.sampled_from(POOLS)), staging, (ROOM, ("staging", 16))))
    return tuple(found)


def inputs(members: tuple[Member, ...]) -> list[str]:
    return [f"{one.name}.{put.name}" for one in members for put in one.program.inputs if put.place != "host"]


@st.composite
def turns(draw: st.DrawFn, one: Member, captured: bool, outputs: list[str], shared: set[str]) -> list[Action]:
    """A turn of a program, on main or on another stream; some take what others gave."""
    actions = list(turn(one, captured=captured))
    states = one.program.states()
    data = [p.name for p in one.program.inputs if p.place != "host" and p.name not in states]
    used = {name for launch in one.program.launches for name in launch.operands}
    data = [name for name in data if name in used and f"{one.name}.{name}" not in shared]
    at = next(k for k, action in enumerate(actions) if isinstance(action, Fill | Run))
    if data and outputs and draw(st.integers(0, 3)) == 0:
        takes = ((draw(st.sampled_from(data)), draw(st.sampled_from(outputs))),)
        actions[at] = evolve(actions[at], takes=takes)
    if captured and draw(st.integers(0, 2)) == 0:
        replay = actions.index(Replay(one.name))
        back = (Record("other", "back"), Wait(MAIN, "back"))
        late = draw(st.integers(0, 2)) == 0  # reads on the other stream too, or on main right away
        actions[replay : replay + 1] = [
            *(Record(MAIN, "there"), Wait("other", "there"), Replay(one.name, "other")),
            *(() if late else back),
        ]
        if late:
            actions = [evolve(a, stream="other") if isinstance(a, Read) else a for a in actions] + list(back)
    return actions


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    """A session that is legal most often."""
    given = draw(members())
    eager = {one.name for one in given if draw(st.integers(0, 3)) == 0}
    given = tuple(
        evolve(one, pool=one.pool if draw(st.integers(0, 2)) == 0 else "") if one.name in eager else one
        for one in given
    )
    shared = [draw(st.sampled_from(inputs((one,)))) for one in given] if draw(st.booleans()) else []
    captures = draw(st.permutations([Capture(one.name) for one in given if one.name not in eager]))
    early = draw(st.integers(0, len(captures)))
    begin: list[list[Action]] = [[Reserve(*ROOM), Reserve("staging", 16)], list(captures[:early])]
    known, middle = set(eager) | {one.member for one in captures[:early]}, []
    outputs: list[str] = []
    later = list(captures[early:])
    for _ in range(draw(st.integers(1, 6))):
        if later and (not known or draw(st.booleans())):
            known.add(later[0].member)
            middle.append([later.pop(0)])
        ready = [one for one in given if one.name in known]
        if not ready:
            continue
        one = draw(st.sampled_from(ready))
        middle.append(draw(turns(one, one.name not in eager, outputs, set(shared))))
        outputs += [f"{one.name}.{output}" for output in one.program.outputs]
    return Session(given, in_turn([*begin, *middle]), (tuple(shared),) if len(shared) > 1 else ())


@st.composite
def mutants(draw: st.DrawFn) -> Session:
    """A session with actions left out, moved, doubled and put in."""
    session = draw(sessions())
    actions = list(session.actions)
    for _ in range(draw(st.integers(0, 3))):
        _change(draw, session, actions)
    return evolve(session, actions=tuple(actions))


def _gives(action: Action) -> str | None:
    """The member whose outputs are new behind an action."""
    return action.member if isinstance(action, Replay | Run) else None


def _change(draw: st.DrawFn, session: Session, actions: list[Action]) -> None:
    def one_of(*kinds: type) -> int | None:
        found = [k for k, action in enumerate(actions) if isinstance(action, kinds)]
        return draw(st.sampled_from(found)) if found else None

    kind = draw(st.sampled_from(["remove", "remove", "swap", "later", "again", "put", "stream"]))
    if kind == "remove" and (k := one_of(Record, Wait, Update, Fill, Reserve)) is not None:
        del actions[k]
    elif kind == "swap" and len(actions) > 1:
        k = draw(st.integers(0, len(actions) - 2))
        if not any(isinstance(action, Read) for action in actions[k : k + 2]):
            actions[k], actions[k + 1] = actions[k + 1], actions[k]
    elif kind == "later" and (k := one_of(Read)) is not None:
        action = actions.pop(k)
        assert isinstance(action, Read)
        again = [n for n, one in enumerate(actions) if n >= k and _gives(one) == action.member]
        # What a replay gave is seen by nobody when the next one has come before its read.
        actions.insert(draw(st.integers(k, min(again, default=len(actions)))), action)
    elif kind == "again" and (k := one_of(Update)) is not None:
        actions.insert(draw(st.integers(0, len(actions))), actions[k])
    elif kind == "stream" and (k := one_of(Fill, Read, Replay)) is not None:
        actions[k] = evolve(actions[k], stream=draw(st.sampled_from([MAIN, "other"])))
    elif kind == "put":
        name = draw(st.sampled_from([one.name for one in session.members]))
        program = next(one.program for one in session.members if one.name == name)
        value = draw(st.sampled_from([*program.outputs, *(put.name for put in program.inputs)]))
        what = [Release(name), Drop(f"{name}.{value}"), Reserve("workspace", 128), Reserve("staging", 32)]
        actions.insert(draw(st.integers(0, len(actions))), draw(st.sampled_from(what)))
