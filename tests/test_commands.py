"""The Makefile with stand-ins for Python and pip: what is installed when, and what an unfit Python is told."""

import os
import platform
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# `python -m venv DIR` leaves a stand-in for pip and for mla-fx that say what they were called with.
STAND_IN = """#!/bin/sh
case "$*" in
  "-m venv "*)
    mkdir -p "$3/bin"
    printf '#!/bin/sh\\necho "python $*" >> calls\\n' > "$3/bin/python"
    printf '#!/bin/sh\\necho "mla-fx $*" >> calls\\n' > "$3/bin/mla-fx"
    chmod +x "$3/bin/python" "$3/bin/mla-fx"
    exit {venv_status} ;;
  *) exit {version_status} ;;
esac
"""


class Checkout:
    """A folder with the Makefile and a stand-in for the system's Python."""

    def __init__(self, folder: Path, venv_status: int = 0, version_status: int = 0) -> None:
        self.folder = folder
        shutil.copy(ROOT / "Makefile", folder)
        (folder / "pyproject.toml").touch()
        python = folder / "system-python"
        python.write_text(STAND_IN.format(venv_status=venv_status, version_status=version_status))
        python.chmod(python.stat().st_mode | stat.S_IXUSR)

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "ARGS"}
        command = ["make", f"PYTHON={self.folder / 'system-python'}", *arguments]
        return subprocess.run(command, cwd=self.folder, env=clean, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[str]:
        """What the stand-ins were called with since the last look."""
        log = self.folder / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


def test_decode_installs_the_defaults_once_and_hands_arguments_on(tmp_path):
    checkout = Checkout(tmp_path)
    assert checkout.make("decode", "ARGS=--ranks 8").returncode == 0
    assert checkout.calls() == ["python -m pip install --quiet --editable .", "mla-fx decode --ranks 8"]
    assert checkout.make("decode").returncode == 0
    assert checkout.calls() == ["mla-fx decode"]


def test_dependencies_that_changed_are_installed(tmp_path):
    checkout = Checkout(tmp_path)
    checkout.make("decode")
    checkout.calls()
    later = (tmp_path / ".venv" / ".run").stat().st_mtime + 10
    os.utime(tmp_path / "pyproject.toml", (later, later))
    assert checkout.make("decode").returncode == 0
    assert checkout.calls() == ["python -m pip install --quiet --editable .", "mla-fx decode"]


@pytest.mark.parametrize(("target", "extras"), [("test", ["[test]"]), ("check", ["[test]", "[test,dev]"])])
def test_each_command_installs_what_it_needs(target, extras, tmp_path):
    checkout = Checkout(tmp_path)
    checkout.make(target)  # `check` then fails for want of ruff, which the stand-in does not install
    calls = checkout.calls()
    installed = [call.removeprefix("python -m pip install --quiet --editable ") for call in calls if "pip" in call]
    assert installed == [".", *("." + extra for extra in extras)]
    here = (platform.system(), platform.machine()) == ("Linux", "x86_64")  # torch_npu has no wheel elsewhere
    assert calls.count("python -m mla_fx.backends.ascend.emulator --install") == here


def test_an_old_python_is_told(tmp_path):
    checkout = Checkout(tmp_path, version_status=1)
    done = checkout.make("decode")
    assert done.returncode == 2
    assert "mla_fx needs Python 3.11 or newer" in done.stderr and "make PYTHON=" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_python_without_venv_is_told_and_leaves_nothing_half_made(tmp_path):
    done = Checkout(tmp_path, venv_status=1).make("decode")
    assert done.returncode == 2
    assert "python3-venv" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_help_is_the_default_and_lists_every_command():
    done = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    for command in ("decode", "generate", "test", "check", "bench", "soak", "clean"):
        assert f"make {command} " in done.stdout
