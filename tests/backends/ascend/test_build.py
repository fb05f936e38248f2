"""How the emulated libraries are made and kept.  Nothing here needs torch_npu but what says so."""

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mla_fx.backends.ascend.emulator import build
from mla_fx.backends.ascend.emulator.trampolines import assembly
from mla_fx.effects import InputError
from tests.test_packaging import PROJECT

NAMES = ["aclnnOne", "aclnnTwo"]


def test_no_wheel(monkeypatch):
    monkeypatch.setattr(build.importlib.machinery.PathFinder, "find_spec", lambda name, path: None)
    advice = r"got none; python -m mla_fx\.backends\.ascend\.emulator --install gets torch_npu 2\.13\.0"
    with pytest.raises(InputError, match=advice):
        build.wheel()


def test_a_wheel_on_the_shelf_is_found_where_none_is_on_the_path(monkeypatch, tmp_path):
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("")
    (tmp_path / "torch_npu-1.2.dist-info").mkdir()
    (tmp_path / "torch_npu-1.2.dist-info" / "METADATA").write_text("Name: torch_npu\nVersion: 1.2\n")
    monkeypatch.setattr(build, "shelf", lambda: tmp_path)
    monkeypatch.setattr(sys, "path", [])
    assert build.wheel() == tmp_path / "torch_npu" and build.version() == "1.2"


def test_installing_fails_with_what_pip_said(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "shelf", lambda: tmp_path / "shelf")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(build, "WHEEL", "0.0.1")
    with pytest.raises(InputError, match=r"install: .* must succeed: got status 1\n[\s\S]*torch_npu==0\.0\.1"):
        build.install()
    monkeypatch.undo()
    assert f"torch_npu=={build.WHEEL}" in PROJECT["project"]["optional-dependencies"]["ascend"]


def test_unknown_machine():
    with pytest.raises(InputError, match="machine: the emulator can be built on x86_64 and aarch64: got riscv64"):
        assembly(NAMES, "riscv64")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_slot_for_each_name(machine):
    lines = assembly(NAMES, machine).splitlines()
    for index, name in enumerate(NAMES):
        start = lines.index(f"{name}:")
        assert any(f"{8 * index}(" in line or f"#{8 * index}]" in line for line in lines[start + 1 : start + 5])
    assert f"  .zero {8 * len(NAMES)}" in lines
    with pytest.raises(InputError, match="operators: aarch64 has entry points for at most 4096: got 4097"):
        assembly([f"n{k}" for k in range(4097)], "aarch64")


@pytest.fixture
def fresh(machine, monkeypatch, tmp_path) -> Path:
    """An empty cache, where something can be built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mla_fx"


def test_what_runs_here_is_complete(machine):
    """What a real compiler has made of the sources as they are."""
    assert {f"{name}.so" for name in build.LIBRARIES} <= {path.name for path in machine.folder.iterdir()}
    assert {"aclnnMatmul", "aclnnAtanGetWorkspaceSize"} <= set(build.entry_points(machine.folder))


#: Takes the arguments of a compiler, complains, and does something instead of writing what it was asked for.
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo "no such instruction" >&2
{} > "$2"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> Callable[[str], None]:
    """One that takes no time."""

    def does(what: str) -> None:
        path = tmp_path / "compiler"
        path.write_text(COMPILER.format(what))
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    does("echo compiled")
    return does


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["", "a real compiler"])
def test_builds_once_for_what_it_is_made_of(fresh, monkeypatch, capfd, compiler, real):
    if real:
        monkeypatch.delenv("CXX")
    folder = build.library_folder(NAMES)
    out, told = capfd.readouterr()
    first, last = told.splitlines()
    assert out == "" and first == f"mla_fx: compiling the emulated CANN, once, into {folder}: up to a minute"
    assert re.fullmatch(r"mla_fx: compiled in \d+ s", last)
    assert set(NAMES) | {"aclnnMatmul"} <= set(build.entry_points(folder))  # ours, and what the wheel can ask for
    assert {f"{name}.so" for name in build.LIBRARIES} <= {path.name for path in folder.iterdir()}
    assert [path.name for path in fresh.iterdir()] == [folder.name]
    compiled = []
    monkeypatch.setattr(build, "_compile", lambda made, names: compiled.append(names))
    assert build.library_folder(NAMES) == folder and compiled == [] and capfd.readouterr() == ("", "")
    assert build.library_folder([*NAMES, "aclnnThree"]) != folder and len(compiled) == 1
    monkeypatch.setattr(build, "version", lambda: "9.9.9")
    assert build.library_folder(NAMES) != folder and len(compiled) == 2


def test_a_build_that_fails_leaves_nothing(fresh, compiler):
    """And says what the compiler said."""
    compiler("exit 1;")
    with pytest.raises(InputError, match=r"compiler: .* must succeed: got status 1\n[\s\S]*no such instruction"):
        build.library_folder(NAMES)
    assert list(fresh.iterdir()) == []


def test_aarch64_entries_are_assembly():
    """They have not been run; where there is an assembler for it, it takes them."""
    tool = shutil.which("aarch64-linux-gnu-as") or (shutil.which("as") if platform.machine() == "aarch64" else None)
    if tool is None:
        pytest.skip("no assembler for aarch64")
    done = subprocess.run(
        [tool, "-o", "/dev/null", "-"], input=assembly(NAMES, "aarch64"), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr


def test_sources_are_shipped():
    """The C++ lies in the package, beside the modules."""
    folder = Path(sys.modules[build.__name__].__file__ or "").resolve().parent
    assert {path.name for path in folder.iterdir() if path.suffix in (".cpp", ".h")} == set(build._SOURCES)
