"""Where nothing is emulated, with the wheel kept for the emulator and without CANN: nobody stumbles over it."""

import importlib
import json
import os
import subprocess
import sys
from multiprocessing import spawn
from typing import Any

import pytest
from attrs import evolve

from mla_fx.backends.ascend.emulator.build import wheel
from tests.backends.ascend.apart import forked
from tests.processes import Nursery
from tests.test_imports import ROOT


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Without a variable that keeps torch from what is installed beside it."""
    clean = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, env=clean)


@pytest.fixture(scope="module")
def apart(processes: Nursery) -> dict[str, Any]:
    """What a process found that has loaded nothing of it, one for all tests here."""
    (found,) = evolve(processes, emulated=None).run(forked, ranks=1)
    return dict(found)


def test_imports_leave_torch_npu_alone(apart):
    """torch loads what has an entry point, transformers what can be found: there is neither."""
    found = {name: modules for name, modules in apart.items() if name.startswith("import ")}
    assert len(found) == 3 and not any(found.values())
    assert not apart["in sight"] and apart["loaded with torch"] == []


@pytest.mark.soak
def test_transformers_leaves_it_alone_too(machine):
    """In a process that is started for it, and forked from none."""
    done = run("-m", "tests.backends.ascend.apart", "transformers.models.deepseek_v3.modeling_deepseek_v3")
    assert done.returncode == 0, done.stderr
    found = {name: modules for name, modules in json.loads(done.stdout).items() if name.startswith("import ")}
    assert len(found) == 4 and not any(found.values())


def test_without_cann_it_says_what_is_missing(apart):
    message = "backend: ascend needs torch_npu==2.13.0 (pip install 'mla-fx[ascend]') and CANN"
    assert apart["get"].startswith(f"InputError: {message}")
    assert "call mla_fx.backends.ascend.emulator.emulate() first, or give --emulate to a command: got " in apart["get"]
    assert apart["status"] == 2 and message in apart["decode"] and "Traceback" not in apart["decode"]


def test_too_late_to_emulate(apart):
    assert apart["too late"].startswith("InputError: emulate: must be called before torch_npu is imported: got")


def test_processes_that_are_spawned_get_a_path_without_it(machine):
    """A spawned process gets the path of the one that spawns it, and imports torch first."""
    path = spawn.get_preparation_data("child")["sys_path"]
    assert str(ROOT) in path and str(wheel().parent) not in path
    assert importlib.machinery.PathFinder.find_spec("torch_npu", path) is None


@pytest.mark.soak
def test_a_spawned_process_imports_torch(machine):
    code = """
import importlib, multiprocessing
if __name__ == "__main__":
    from mla_fx.backends.ascend.emulator import emulate
    emulate()
    process = multiprocessing.get_context("spawn").Process(target=importlib.import_module, args=("torch",))
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
