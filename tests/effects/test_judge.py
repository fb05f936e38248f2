"""The law and an exhaustive judge of small programs agree, and so do the scheduler and the judge.

Up to six launches on three streams, with two groups and two workspaces: every
interleaving is played (`tests.effects.judge`).
"""

import pytest
from attrs import evolve
from hypothesis import given

from mla_fx.effects import Drop, Keep, Program, Record, Wait, check, schedule, violations
from tests.effects import toys
from tests.effects.judge import Judge
from tests.effects.test_check import CHAIN, FORKED, LENT, shared
from tests.effects.test_law_teeth import mutants, quick, settings

SMALL = (toys.steps(max_calls=6), toys.orchestrations(max_streams=3))


def agree(program: Program) -> str:
    """What both say of a program: "legal", "wrong", or "malformed", of which the judge has nothing to say."""
    found = violations(program)
    if any(not v.order and v.rule != 5 for v in found):
        return "malformed"
    verdict = Judge(program).verdict()
    if not found:
        assert not verdict, f"accepted, and goes wrong: {verdict}\n{program}"
        return "legal"
    text = "\n".join(map(str, found))
    assert verdict, f"refused, and cannot go wrong:\n{text}\n{program}"
    return "wrong"


def minimal(step: toys.Step, streams: object) -> None:
    """A scheduled program is right, and nothing in it could go."""
    program = schedule(step, streams)
    check(program)
    assert not Judge(program).verdict(), f"scheduled, and goes wrong\n{program}"
    for index, effect in enumerate(program.effects):
        if isinstance(effect, Record | Wait | Keep):
            assert agree(program.without(index)) in ("wrong", "malformed"), f"needless: '{effect}'\n{program}"
            if not isinstance(effect, Record):
                idle = toys.without_idle_records(program.without(index))
                assert Judge(idle).verdict(), f"needless: '{effect}'\n{program}"


def test_programs_by_hand():
    for program in (FORKED, LENT, CHAIN, shared(toys.One)):
        assert agree(program) == "legal"
    for index, effect in enumerate(CHAIN.effects):
        if isinstance(effect, Keep):
            assert Judge(CHAIN.without(index)).verdict() == {"race"}
    assert Judge(shared(toys.Scratch)).verdict() == {"race"}
    assert Judge(shared(toys.Exchange)).verdict() == {"collectives"}
    assert Judge(FORKED.without(6)).verdict() == {"race"}
    waits = evolve(FORKED, effects=(Record("main", "e9"), Wait("idle", "e9"), *FORKED.effects))
    assert Judge(waits).verdict() == {"unjoined"}
    early = [e for e in LENT if not isinstance(e, Keep | Drop)]
    assert agree(evolve(LENT, effects=(*early[:-1], Drop("a"), early[-1]))) == "legal"


def test_law_and_judge_agree():
    """And every verdict occurs."""
    seen: set[str] = set()

    @settings(quick, max_examples=100)
    @given(mutants(max_calls=6, max_streams=3))
    def collect(pair):
        seen.add(agree(pair[1]))

    collect()
    assert seen == {"legal", "wrong", "malformed"}


@settings(quick, max_examples=60)
@given(*SMALL)
def test_scheduled_programs_are_right_and_minimal(step, streams):
    minimal(step, streams)


@pytest.mark.soak
@settings(quick, derandomize=False, max_examples=20000)
@given(mutants(max_calls=6, max_streams=3))
def test_law_and_judge_agree_on_many(pair):
    agree(pair[1])


@pytest.mark.soak
@settings(quick, derandomize=False, max_examples=5000)
@given(*SMALL)
def test_many_scheduled_programs_are_right_and_minimal(step, streams):
    minimal(step, streams)
