"""When a rank of a group is lost: who is named, where, why, and how soon."""

import os
import pickle
import re
import subprocess
import sys

import pytest

from mla_fx.backends import PeerError
from tests.backends import lost as do
from tests.processes import ROOT

TIMEOUT = 6.0
#: More than the time-out, for processes that share two cores.
LATE = 3.0


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
                assert outcome.error == f"ended with status {9 if how == 'hangs' else -9}"
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


def test_a_batch_that_one_rank_refuses(processes):
    """The others are told at once; what all refuse holds nobody up, however far they are apart."""
    found = processes.run(do.refuse, ranks=do.RANKS, timeout=4 * TIMEOUT, params=GIVEN["params"])
    for rank, (first, all_refuse, second, last) in enumerate(found):
        assert (first, second) == ("well", "well")
        assert all_refuse["kind"] == "InputError"
        if rank == do.CULPRIT:
            assert last["kind"] == "InputError" and last["text"] == all_refuse["text"]
        else:
            culprit = f"lost rank 2: it raised InputError: {found[do.CULPRIT][1]['text']}"
            assert last["text"] == f"all_reduce over tp[4]: {culprit}"
            assert last["seconds"] < TIMEOUT


def test_ranks_that_disagree(processes):
    """Every one is told what differs, and where."""
    ranks, same = "on ranks 0, 1, 3", "must be the same on all ranks of the group: got"
    for layout, model, drafts, program in processes.run(do.disagree, ranks=do.RANKS, timeout=10 * TIMEOUT):
        assert layout == f"layout: {same} tp=4 {ranks}; tp=2 on rank 2"
        assert re.fullmatch(rf"model: {same} [0-9a-f]{{16}} {ranks}; [0-9a-f]{{16}} on rank 2", model)
        assert drafts == f"drafts: {same} nothing {ranks}; 2 on rank 2"
        assert re.fullmatch(rf"program: {same} [0-9a-f]{{16}} {ranks}; [0-9a-f]{{16}} on rank 2", program)


OUTSIDE = {
    "raises": "agree: lost rank 2: it raised ZeroDivisionError: on purpose",
    "leaves": "share: lost rank 2: it has left the group",
    "never comes": f"agree: lost rank 2: after {TIMEOUT:g} s it has come to the start of step 0, "
    "others to collective 1 of step 2: it hangs, or is too slow",
}


def test_a_rank_is_lost_outside_of_a_step(processes):
    """One of each group of four, which wait side by side."""
    found = processes.run(do.elsewhere, ranks=do.RANKS * len(OUTSIDE), hows=[*OUTSIDE], timeout=TIMEOUT)
    for case, (how, text) in enumerate(OUTSIDE.items()):
        for rank, said in enumerate(found[case * do.RANKS :][: do.RANKS]):
            if rank != do.CULPRIT:
                assert said["kind"] == "PeerError" and said["text"] == text, said
                assert said["seconds"] < (TIMEOUT + LATE if how == "never comes" else TIMEOUT / 2), (how, said)


def test_the_rank_that_holds_the_store_is_lost(processes):
    """Killed or stopped, it can be asked by nobody; the others fail in time all the same, and go."""
    found = processes.outcomes(do.keep_the_store, ranks=2 * do.RANKS, hows=["killed", "stopped"], timeout=TIMEOUT)
    for keeper, *others in (found[: do.RANKS], found[do.RANKS :]):
        assert keeper.error == "ended with status -9"
        for outcome in others:
            assert outcome.error is None, outcome.error
            said = outcome.value
            assert said["kind"] == "PeerError" and said["ranks"] == (0,)
            assert re.match("share: lost rank 0: the store, which it holds, has not answered for ", said["text"])
            assert said["seconds"] < TIMEOUT + LATE and said["left"] < 3 * TIMEOUT + LATE


def test_an_error_is_a_value():
    error = PeerError((1, 3), "it raised Boom", "layers.0, all_reduce over tp[4]")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "layers.0, all_reduce over tp[4]: lost ranks 1, 3: it raised Boom"
    assert (again.ranks, again.why, again.where) == (error.ranks, error.why, error.where)


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "name"), [("gloo", "cpu"), ("hccl", "ascend")])
def test_torchrun_starts_them_again(kind, name):
    """Nothing is in the way that the first round left, and the next one is like any other."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command = [*torchrun, "--nproc-per-node", "2", "-m", "tests.backends.again", kind, name]
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "finished with True in round 1"
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "mla_fx" in name]
