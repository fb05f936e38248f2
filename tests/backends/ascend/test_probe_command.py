"""The probe as a command: processes that die of a case, what is printed and written, errors, torchrun."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from attrs import evolve

from mla_fx import cli, cli_probe
from mla_fx.backends.ascend.probe import POINTS, About, Case, Found, Point, Site, site
from mla_fx.backends.ascend.probe import __main__ as speaking
from mla_fx.backends.ascend.probe.__main__ import main as speak
from mla_fx.backends.ascend.probe.apart import apart
from mla_fx.backends.ascend.probe.report import heading
from mla_fx.backends.ascend.probe.run import attempt
from mla_fx.backends.ascend.probe.site import opened
from mla_fx.effects import InputError
from tests.backends.ascend.test_probe import beyond, holds, known, of, raises, trial
from tests.test_cli import run as command
from tests.test_imports import ROOT

#: A process that speaks as the probe's does, without a device; `{}` is what it does with the case `number`.
STAND_IN = """
import json, os, signal, sys, time
pipe, start = os.fdopen(int(sys.argv[1]), "w"), int(sys.argv[2])
def say(kind, what):
    pipe.write(json.dumps({{kind: what}}) + "\\n")
    pipe.flush()
{before}
say("about", {{"versions": {{"torch": "1"}}, "environment": {{}}, "cann": [9, 1]}})
for number in range(start, 4):
    say("begun", number)
    {there}
    say("found", {{"point": 1, "case": "abcd"[number], "outcome": {{"verdict": "holds", "detail": str(os.getpid())}}}})
"""


def _of_stand_in(there: str = "pass", before: str = "", patience: float = 60) -> list[About | Found]:
    code = STAND_IN.format(there=there, before=before)
    point = trial(*(Case(name, holds) for name in "abcd"))
    return list(apart([point], command=[sys.executable, "-c", code], patience=patience))


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ("if number == 1: os.kill(os.getpid(), signal.SIGSEGV)", f"the process ended with status -{signal.SIGSEGV}"),
        ("if number == 1: os._exit(3)", "the process ended with status 3"),
        ("if number == 1: time.sleep(60)", "no answer within 3 s"),
    ],
    ids=["segfault", "exit", "hang"],
)
def test_a_case_that_takes_its_process_with_it_costs_nothing_but_itself(there, why):
    about, *found = _of_stand_in(there, patience=3 if "sleep" in there else 60)
    assert about == About({"torch": "1"}, {}, (9, 1))
    assert [(one.case, one.outcome.verdict) for one in found] == [
        *(("a", "holds"), ("b", "faults"), ("c", "holds"), ("d", "holds"))
    ]
    assert found[1].outcome.detail == why
    assert found[0].outcome.detail != found[2].outcome.detail == found[3].outcome.detail


def test_a_device_that_cannot_be_opened_is_an_error_at_first_and_an_answer_later():
    with pytest.raises(InputError, match=r"^no NPU$"):
        _of_stand_in(before="say('error', 'no NPU'); sys.exit()")
    with pytest.raises(InputError, match=f"^the process ended with status -{signal.SIGKILL}$"):
        _of_stand_in(before="os.kill(os.getpid(), signal.SIGKILL)")
    _, *found = _of_stand_in("if number == 1: os._exit(3)", before="if start: say('error', 'no NPU'); sys.exit()")
    assert [one.outcome.verdict for one in found] == ["holds", "faults", "not run", "not run"]
    assert found[3].outcome.detail == "no NPU"


@pytest.mark.cann("9.1")
def test_what_the_process_of_a_probe_says(emulator):
    """Both ends of the pipe in this process."""
    hear, say = os.pipe()
    speak(say, 1, (trial(Case("a", raises), Case("b", raises)),), opened(emulated=True))
    with os.fdopen(hear) as lines:
        about, begun, found = map(json.loads, lines)
    assert about["about"]["versions"]["CANN"] == emulator.release.version and about["about"]["cann"] == [9, 1]
    assert begun == {"begun": 1} and found["found"]["case"] == "b"
    assert found["found"]["outcome"]["verdict"] == "refused"


OF_TRIAL = """
import sys
from mla_fx.backends.ascend.probe.__main__ import main
from mla_fx.backends.ascend.probe.site import opened
from tests.backends.ascend.test_probe_command import faulting
main(int(sys.argv[1]), int(sys.argv[2]), [faulting()], opened(emulated=True))
"""


def faulting() -> Point:
    return trial(Case("a", holds), Case("b", beyond), Case("c", raises), Case("d", beyond))


@pytest.mark.soak
@pytest.mark.usefixtures("emulator")
def test_a_fault_of_the_device_costs_nothing_but_itself():
    """In processes that emulate a device each."""
    about, *found = apart([faulting()], command=[sys.executable, "-c", OF_TRIAL])
    assert about.versions["device"] == "Ascend910B1, emulated"
    assert [one.outcome.verdict for one in found] == ["holds", "faults", "refused", "faults"]
    assert "507011" in found[1].outcome.detail


# --- the command ------------------------------------------------------------------------


@pytest.fixture
def two_points(monkeypatch):
    monkeypatch.setattr(cli_probe, "POINTS", (of(6), of(7)))


@pytest.mark.cann("9.1")
def test_command(capsys, emulator, two_points, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    monkeypatch.setenv("HCCL_BUFFSIZE", "200")
    status, out, _ = command(capsys, "probe", "--emulate")
    assert status == 0 and not list(tmp_path.iterdir())
    assert "torch_npu 2.13.0, CANN 9.1.0, device Ascend910B1, emulated, devices 8, processes 1" in out
    assert "  TASK_QUEUE_ENABLE: 1\n" in out and "  HCCL_BUFFSIZE: 200\n" in out
    assert "  HCCL_OP_EXPANSION_MODE: not set (advised: AIV)\n" in out
    assert "   refused   float32                   561002: aclnnScatterPaKvCache: key must be" in out
    assert "   -> Routing stays as it is, with active_num T * K.\n" in out
    assert out.endswith("\n4 holds, 2 refused; nothing fails that the backend rests on\n")


@pytest.mark.cann("9.1")
def test_report(capsys, emulator, two_points, tmp_path, monkeypatch):
    """What does not hold that the backend rests on is marked, counted and the exit status."""
    spoilt = evolve(of(7), cases=(of(7).cases[0], evolve(of(7).cases[1], run=raises)))
    monkeypatch.setattr(cli_probe, "POINTS", (of(6), spoilt))
    status, out, _ = command(capsys, "probe", "--emulate", "--json", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert status == 1 and " ! refused   active_num T * K  561002: aclnnX: not so\n" in out
    assert out.endswith("3 refused; what the backend rests on and does not hold: 7. active_num T * K\n")
    assert report["cann"] == [9, 1] and report["versions"]["torch"] == torch.__version__
    assert report["lacking"] == [{"point": 7, "case": "active_num T * K"}]
    assert [(point["number"], point["means"]) for point in report["points"]] == [
        (6, "Cache writes stay as they are: float32 as pairs of bf16, no more rows than slots."),
        (7, "permute_tokens.py: routing must not go through the operator here."),
    ]
    written, float32 = report["points"][0]["cases"][:2]
    assert written["needed"] and written["verdict"] == "holds"
    assert not float32["needed"] and float32["verdict"] == "refused" and "NPU function error" in float32["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cann", "9.0"), "--cann: is for --emulate: got --cann 9.0"),
        (("--emulate", "--cann", "8.4"), "cann: must be one of 8.5, 9.0, 9.1: got 8.4"),
        (
            ("--emulate", "--json", "/there/is/none"),
            "--json: must be a file in a folder that is there: got /there/is/none",
        ),
        (("--emulate", "--json", "/"), "--json: must be a file in a folder that is there: got /"),
        (("--emulate", "--json", "/proc/nothing.json"), "--json: must be a file that can be written: got "),
    ],
)
def test_errors_name_the_field(capsys, emulator, monkeypatch, arguments, message):
    monkeypatch.setattr(cli_probe, "POINTS", (of(7),))
    status, _, err = command(capsys, "probe", *arguments)
    assert status == 2 and err.startswith(f"mla-fx probe: {message}")


def _spoken(*, emulated: bool = True) -> list[dict[str, Any]]:
    """What a process says of all points, both ends of the pipe in this one; few lines, as a pipe has little room."""
    hear, say = os.pipe()
    speak(say, 0, POINTS, opened(emulated=emulated))
    with os.fdopen(hear) as lines:
        return list(map(json.loads, lines))


def test_what_the_process_of_a_probe_says_without_a_device(emulator, monkeypatch):
    def require() -> None:
        raise InputError("backend: ascend needs it")

    monkeypatch.setattr(site, "require_torch_npu", require)
    assert _spoken(emulated=False) == [{"error": "backend: ascend needs it"}]


def test_what_it_says_of_a_device_that_is_dead(emulator, monkeypatch):
    """Nothing is asked, so that no process is started for each case in vain."""
    with monkeypatch.context() as patch:
        patch.setattr(speaking, "fault", lambda: "507011: dead")
        about, error = _spoken()
    assert "about" in about and error == {"error": "device: must add numbers: got 507011: dead"}
    assert attempt(Site((9, 1), emulator), Case("beyond", beyond)).verdict == "refused"  # and the emulated one is dead
    (error,) = _spoken()
    assert error["error"].startswith("device: must be possible to open: got 507011")


def test_a_device_that_is_not_there_is_an_error_of_the_command(capsys, monkeypatch):
    nothing = "say('error', 'no NPU'); sys.exit()"
    monkeypatch.setattr(cli_probe, "apart", lambda points: iter(_of_stand_in(before=nothing)))
    assert command(capsys, "probe") == (2, "", "mla-fx probe: no NPU\n")


@pytest.mark.soak
def test_without_a_device_one_line_says_what_to_do(capsys, emulator):
    """The process that opens the device is another, where nothing is emulated."""
    status, out, err = command(capsys, "probe")
    assert status == 2 and not out and len(err.splitlines()) == 1
    assert err.startswith("mla-fx probe: backend: ascend needs torch_npu==2.13.0") and "--emulate" in err


@pytest.mark.parametrize("example", cli._EXAMPLES["probe"])
def test_examples_of_the_help_are_commands(example):
    words = example.split("    ")[0].split()
    options = cli._parser().parse_args(words[words.index("probe") :])
    assert options.run is cli._probe and ("--emulate" in words) == options.emulate


def test_an_unknown_release_of_cann_is_told():
    lines = list(heading(About({"torch": "1"}, {}, (9, 2))))
    assert lines[-1] == "CANN 9.2 is not one that the rules were written by: 8.5, 9.0, 9.1."
    assert not any("rules were written" in line for line in heading(About({"torch": "1"}, {}, (9, 1))))


@pytest.mark.soak
def test_under_torchrun(emulator, tmp_path):
    """All seventeen points on two ranks, each with an emulated device of its own."""
    report = tmp_path / "report.json"
    words = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "mla_fx",
        "probe",
        "--emulate",
        "--cann",
        "9.0",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words, "--json", str(report)], cwd=ROOT, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    points = json.loads(report.read_text())["points"]
    got = {(point["number"], case["case"]): case["verdict"] for point in points for case in point["cases"]}
    group = {(point.number, case.name) for point in POINTS[10:12] for case in point.cases}
    assert {key: verdict for key, verdict in got.items() if verdict != "holds"} == {
        key: verdict for key, verdict in known("9.0").items() if key not in group
    }
