"""Sessions on the hostile machine: what the law accepts is right under every seed, the public faults go wrong."""

from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

import hypothesis
import pytest
import torch
from attrs import evolve
from hypothesis import settings

from mla_fx.backends.hostile import HangError
from mla_fx.backends.hostile_session import play
from mla_fx.effects import (
    Capture,
    Fill,
    Launch,
    LawError,
    Program,
    Read,
    Replay,
    Run,
    Session,
    every_order,
    session_violations,
    turn,
)
from tests.effects import toys
from tests.effects.random_sessions import mutants
from tests.effects.sessions import BIG, BIG_TURN, EAGER, FAULTS, RESERVE, SMALL_TURN, session
from tests.effects.test_law_teeth import quick
from tests.effects.toys import RANKS, SIZE, mix

#: A fault that exists is found well within this many seeds.
SEARCH = range(1500)
Values = dict[str, list[Any]]  # name -> what each rank has


def given(member: str, name: str, turn: int, rank: int) -> Any:
    """What the caller gives, another in each turn."""
    first = crc32(f"{member}.{name}".encode()) % 1000 + 13 * turn + 7 * rank
    return (first % 17, first % 5) if name == "lengths" else torch.full((SIZE,), float(first), dtype=torch.float64)


def states_of(session: Session) -> dict[str, list[torch.Tensor]]:
    shared = {name: names[0] for names in session.shared for name in names}
    written = {f"{one.name}.{put}" for one in session.members for put in one.program.states()}
    return {
        name: [torch.full((SIZE,), 11.0 * k + rank, dtype=torch.float64) for rank in range(RANKS)]
        for k, name in enumerate(sorted({shared.get(name, name) for name in written} | set(shared.values())))
    }


# --- the oracle: every program alone, with memory of its own -----------------------


def apply(launch: Launch, operands: Sequence[Any], rank: int) -> list[torch.Tensor]:
    """The results of a toy op, from its definition; of a collective from what all ranks have."""
    salt = launch.op.salt
    match launch.op:
        case toys.Lengths():
            x, lengths = operands
            return [mix(x, salt=salt + sum((k + 1) * one for k, one in enumerate(lengths)))]
        case toys.Exchange():
            (of_ranks,) = operands
            return [mix(*(of_ranks[(rank + k) % RANKS] for k in range(RANKS)), salt=salt)]
        case toys.Fork():
            return [mix(*operands, salt=salt), mix(*operands, salt=salt + 1)]
        case toys.Peek():
            return [operands[0], mix(*operands, salt=salt)]
    return [mix(*operands, salt=salt)]


def evaluate(program: Program, values: Values) -> Values:
    """All values of a program, launch after launch."""
    values = dict(values)
    for launch in program.launches:
        operands = [values[name] for name in launch.operands]
        if launch.op.communicates:
            found = [apply(launch, operands, rank) for rank in range(RANKS)]
        else:
            found = [apply(launch, [x[rank] for x in operands], rank) for rank in range(RANKS)]
        values.update({name: [one[k] for one in found] for k, name in enumerate(launch.results)})
        for name, root in program.memory().items():
            if name in launch.results and root in values and launch.op.written():
                values[root] = values[name]
    return values


class Ideal:
    """A session in which everything happens at once, and nobody shares anything but states."""

    def __init__(self, session: Session) -> None:
        self.session, self.programs = session, {one.name: one.program for one in session.members}
        self.shared = {name: names[0] for names in session.shared for name in names}
        self.states = states_of(session)
        self.static: dict[str, Values] = {}
        self.outputs: dict[str, Values] = {}
        self.turns = dict.fromkeys(self.programs, 0)
        self.read: list[list[torch.Tensor]] = []
        for action in session.actions:
            self.act(action)

    def taken(self, member: str, takes: Iterable[tuple[str, str]]) -> Values:
        """Data inputs of a turn."""
        found = {}
        for put in self.programs[member].inputs:
            if put.place != "host" and self.state(member, put.name) not in self.states:
                found[put.name] = [given(member, put.name, self.turns[member], rank) for rank in range(RANKS)]
        for put, source in takes:
            owner, _, output = source.partition(".")
            found[put] = self.outputs[owner][output]
        return found

    def state(self, member: str, put: str) -> str:
        return self.shared.get(f"{member}.{put}", f"{member}.{put}")

    def act(self, action: Any) -> None:
        match action:
            case Fill():
                self.static[action.member] = self.taken(action.member, action.takes)
            case Replay():
                self.turn(action.member, self.static.get(action.member) or self.taken(action.member, ()))
            case Run():
                self.turn(action.member, self.taken(action.member, action.takes))
            case Read():
                self.read.append(self.outputs[action.member][action.output])

    def turn(self, member: str, static: Values) -> None:
        """One turn, with the lengths of that turn whether they are set or not."""
        program = self.programs[member]
        states = {put.name: self.state(member, put.name) for put in program.inputs}
        states = {put: name for put, name in states.items() if name in self.states}
        puts = [put.name for put in program.inputs if put.place == "host"]
        lengths = {put: [given(member, put, self.turns[member], rank) for rank in range(RANKS)] for put in puts}
        values = evaluate(program, {**static, **lengths, **{put: self.states[name] for put, name in states.items()}})
        self.states.update({name: values[put] for put, name in states.items()})
        self.outputs[member] = {name: values[name] for name in program.outputs}
        self.turns[member] += 1


def flat(found: tuple[list[list[torch.Tensor]], dict[str, list[torch.Tensor]]]) -> list[float]:
    reads, states = found
    return [float(x) for tensors in (*reads, *(states[name] for name in sorted(states))) for t in tensors for x in t]


def played(session: Session, seed: int) -> list[float]:
    return flat(play(session, toys.backend(), given, states_of(session), seed=seed, unchecked=True))


def right(session: Session, seeds: Iterable[int]) -> None:
    ideal = Ideal(session)
    expected = flat((ideal.read, ideal.states))
    for seed in seeds:
        assert toys.same(played(session, seed), expected), f"wrong under seed {seed}\n{session}"


def goes_wrong(session: Session, seeds: Iterable[int] = SEARCH) -> bool:
    """Whether some seed gives anything else, or hangs."""
    ideal = Ideal(session)
    expected = flat((ideal.read, ideal.states))
    try:
        return any(not toys.same(played(session, seed), expected) for seed in seeds)
    except HangError:
        return True


# --- by hand -----------------------------------------------------------------------


def test_captured_and_eager_programs_in_any_order_are_right():
    turns = [BIG_TURN, SMALL_TURN, turn(EAGER, captured=False)]
    right(session(RESERVE, Capture("big"), Capture("small"), *every_order(turns)), range(6))


def test_lengths_that_are_fixed_need_no_update():
    fixed = evolve(BIG, program=BIG.program.with_fixed({"lengths": given("big", "lengths", 0, 0)}))
    one = Session((fixed,), (RESERVE, Capture("big"), *turn(fixed, captured=True)))
    (out, _), _ = play(one, toys.backend(), given, states_of(one), seed=1)
    assert torch.equal(out[0], Ideal(one).read[0][0])


@pytest.mark.parametrize("name", FAULTS)
def test_a_public_fault_goes_wrong_and_mended_it_is_right(name):
    fault = FAULTS[name]
    assert goes_wrong(fault.broken)
    right(fault.mended, range(10))


def test_what_breaks_the_law_is_not_played():
    with pytest.raises(LawError, match="rule 9"):
        broken = FAULTS["forgotten task update"].broken
        play(broken, toys.backend(), given, states_of(broken), seed=0)


# --- at random ---------------------------------------------------------------------


def verdict_holds(session: Session, seeds: Iterable[int] = SEARCH) -> str:
    """Compare the law's verdict with the machine's; returns which of the three cases it was."""
    found = session_violations(session)
    if not found:
        right(session, range(6))
        return "accepted"
    if any(one.order for one in found) and all(one.order or one.rule == 4 for one in found):
        text = "\n".join(map(str, found))
        assert goes_wrong(session, seeds), f"refused, never wrong:\n{text}\n{session}"
        return "refused"
    return "malformed"  # names that are not there, or what has not been captured: nothing to play


def test_verdict_of_random_sessions():
    """And all three verdicts occur."""
    seen: set[str] = set()

    @settings(quick, max_examples=40)
    @hypothesis.given(mutants())
    def collect(session):
        seen.add(verdict_holds(session))

    collect()
    assert seen == {"accepted", "refused", "malformed"}


@pytest.mark.soak
@settings(quick, derandomize=False, max_examples=5000)
@hypothesis.given(mutants())
def test_verdict_of_many_random_sessions(session):
    verdict_holds(session)
