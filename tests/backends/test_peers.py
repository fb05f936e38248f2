"""When a rank of a group is lost: who is named, where, why, and how soon."""

from collections.abc import Iterator

import pytest

from tests.backends import lost as do
from tests.processes import Nursery, nursery

TIMEOUT = 2.0
#: More than the time-out, for processes that share two cores.
LATE = 1.5


@pytest.fixture(scope="module")
def processes() -> Iterator[Nursery]:
    with nursery() as made:
        yield made


COLLECTIVES = [launch for launch in do.program().launches if launch.op.communicates]
#: Those of the layer with experts, and what is before and behind all layers.
CHOSEN = [k for k, launch in enumerate(COLLECTIVES) if not launch.tag.startswith("layers.0.")]
GIVEN = {"collectives": CHOSEN, "timeout": TIMEOUT, "params": do.SETUP.params()}

WHY = {
    "killed": "dead or stopped",
    "stopped": "dead or stopped",
    "raises": "it raised RunError: ",
    "hangs": f"after {TIMEOUT:g} s it has come to ",
}


@pytest.mark.parametrize("how", WHY)
def test_a_rank_is_lost_in_a_collective(processes, how):
    """In any of a layer: all others name rank, op, layer and group, within the time-out."""
    found = processes.outcomes(do.lose, ranks=do.RANKS * len(CHOSEN), how=how, **GIVEN)
    for number, outcome in enumerate(found):
        case, rank = divmod(number, do.RANKS)
        launch = COLLECTIVES[CHOSEN[case]]
        if rank == do.CULPRIT:
            if how == "raises":
                assert outcome.value["kind"] == "RunError" and "ZeroDivisionError: on purpose" in outcome.value["text"]
            else:
                assert outcome.error == "ended with status -9"
            continue
        assert outcome.error is None, outcome.error
        said = outcome.value
        where = f"{launch.op.name} over {launch.op.group_of()}"
        where = f"{launch.tag}, {where}" if launch.tag else where
        assert said["kind"] == "PeerError" and said["ranks"] == (do.CULPRIT,), said
        assert said["text"].startswith(f"{where}: lost rank {do.CULPRIT}: ") and WHY[how] in said["text"], said
        assert said["seconds"] < (TIMEOUT / 2 if how == "raises" else TIMEOUT + LATE), said


def test_a_slow_rank_changes_nothing(processes):
    """As long as it comes within the time-out."""
    ranks = do.RANKS * len(CHOSEN)
    assert processes.run(do.lose, ranks=ranks, how="slow", **GIVEN) == [{"same": True}] * ranks
