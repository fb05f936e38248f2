"""When a rank of a group on devices is lost: who is named where the host waits for its device."""

import re

import pytest

from tests.backends.ascend import lost as do
from tests.backends.lost import CULPRIT
from tests.cases import mostly_soak

TIMEOUT = 5.0
#: More than the time-out, for processes that share two cores, and for HCCL, which counts in seconds.
LATE = 3.0
NAMES = ["gather_heads", "all_to_all", "all_reduce"]
WHY = {
    "killed": "dead or stopped",
    "stopped": "dead or stopped",
    "raises": "it raised RunError: ",
    "hangs": "it hangs, or is too slow",
}
CASES = [(how, number) for how in WHY for number in range(3)]


@pytest.mark.parametrize(("how", "number"), mostly_soak(CASES, [("killed", 1), ("stopped", 2), ("raises", 0)]))
def test_a_rank_is_lost_in_a_collective(processes, how, number):
    """All others name it, the group, and the collective that it is not known to have come to, or one behind it."""
    found = processes.outcomes(do.lose, ranks=4, how=how, collective=number, timeout=TIMEOUT)
    for rank, outcome in enumerate(found):
        if rank == CULPRIT:
            continue
        assert outcome.error is None, outcome.error
        said = outcome.value
        assert said["kind"] == "PeerError" and said["ranks"] == (CULPRIT,), said
        names = "|".join(NAMES[: number + 1])
        assert re.match(rf"attention, ({names}) over (dcp|tp)\[4\] or one behind it: lost rank 2: ", said["text"]), said
        assert WHY[how] in said["text"] and said["seconds"] < TIMEOUT + LATE, said
        if how == "raises":
            assert f"{NAMES[number]} " in said["text"].split("it raised")[1]


def test_a_transport_that_waits_for_long_is_not_waited_for(processes, tmp_path):
    """The process ends, and says why: nothing else ends the wait of a host for its device."""
    given = {"how": "hangs", "collective": 1, "timeout": 2.0, "errors": str(tmp_path)}
    found = processes.outcomes(do.outlive, ranks=4, **given)
    for rank, outcome in enumerate(found):
        if rank == CULPRIT:
            continue
        assert outcome.error == "ended with status 1", outcome
        said = (tmp_path / str(rank)).read_text().splitlines()[-1]
        assert re.match(r"PeerError: attention, \w+ over dcp\[4\] or one behind it: lost rank 2: after 2 s ", said)
