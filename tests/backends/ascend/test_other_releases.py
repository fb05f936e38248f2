"""All tests of this folder on the releases of CANN that the run itself is not on; each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_fx.backends.ascend.emulator.releases import RELEASES
from tests.test_imports import ROOT


@pytest.mark.soak
@pytest.mark.parametrize("cann", RELEASES)
def test_everything_here_holds(machine, pytestconfig, cann):
    """With its long runs.  The wheel asks for the release once a process, and so do our rules."""
    if cann == pytestconfig.getoption("--cann"):
        pytest.skip("the release of this run")
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "--soak", f"--cann={cann}", f"--ignore={__file__}", str(folder)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stdout[-5000:]
