"""Sessions on the emulated device, through torch_npu: the public faults go wrong, what the law accepts is right."""

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import settings

from mla_fx.effects import Session, session_violations
from tests.backends.ascend.session_player import Player
from tests.backends.test_sessions import Ideal, flat, given, states_of
from tests.effects.random_sessions import sessions
from tests.effects.sessions import FAULTS
from tests.effects.test_law_teeth import quick

pytestmark = pytest.mark.usefixtures("emulator")

#: What a fault comes to on the device: values, memory of somebody else's, or what the device says.
VALUES, SOMEBODYS, COPIES, WAITS = (
    "other values",
    "a tensor of somebody else's was written",
    "operation not permitted when a stream is capturing",
    "aclnnFusedInferAttentionScoreV4 of a graph",
)
COMES_TO = {
    "exchange buffers freed after capture": SOMEBODYS,
    "exchange buffers in no pool": VALUES,
    "graphs that recycle staging memory": VALUES,
    "graphs that recycle outputs": VALUES,
    "workspace keyed by stream": COPIES,
    "forgotten task update": WAITS,
    "branch on empty shards": COPIES,
}


def wrong(emulator: Any, session: Session, seed: int) -> str:
    """Why a session is wrong under a seed, "" where it is right."""
    ideal = Ideal(session)
    emulator.seed(seed)
    try:
        found = Player(session, torch.npu, given, states_of(session)).play()
    except (RuntimeError, AssertionError) as error:
        emulator.recover()
        return str(error)
    return "" if flat(found) == flat((ideal.read, ideal.states)) else VALUES


@pytest.mark.parametrize("name", FAULTS)
def test_a_public_fault_goes_wrong_and_mended_it_is_right(emulator, name):
    """The same sessions as the law refuses by their rule, and as the hostile machine plays."""
    fault = FAULTS[name]
    assert any(COMES_TO[name] in wrong(emulator, fault.broken, seed) for seed in range(12))
    assert [wrong(emulator, fault.mended, seed) for seed in range(4)] == [""] * 4


def right(emulator: Any, session: Session, seed: int) -> bool:
    """Whether the law accepts a session, which must then be right."""
    if session_violations(session):
        return False
    assert not wrong(emulator, session, seed), f"seed {seed}\n{session}"
    return True


def test_random_sessions_that_the_law_accepts_are_right(emulator):
    seen = []

    @settings(quick, max_examples=8)
    @hypothesis.given(sessions())
    def play(session):
        seen.append(right(emulator, session, len(seen)))

    play()
    assert sum(seen) > 3


@pytest.mark.soak
@settings(quick, derandomize=False, max_examples=500)
@hypothesis.given(sessions(), hypothesis.strategies.integers(0, 1000))
def test_many_random_sessions_that_the_law_accepts_are_right(emulator, session, seed):
    right(emulator, session, seed)
