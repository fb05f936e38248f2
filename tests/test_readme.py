"""The READMEs run: their code, its printed output, the files and commands they name; and so do all doctests."""

import contextlib
import doctest
import importlib
import io
import re
from pathlib import Path

import pytest

from tests.test_imports import ROOT, SOURCES

#: The door of every folder.
READMES = sorted(path for path in ROOT.glob("**/README.md") if not any(p.is_symlink() for p in path.parents))
READMES = [path for path in READMES if ".venv" not in path.parts and "node_modules" not in path.parts]
each_readme = pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
#: Emulates a device, and so runs in a process of its own, in `tests/backends/ascend/test_emulator_as_a_tool.py`.
APART = ROOT / "backends" / "ascend" / "emulator" / "README.md"
BLOCK = re.compile(
    r"(?:<!-- (?P<note>output|no-run) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


def test_every_folder_has_a_door():
    doors = {path.parent.relative_to(ROOT).as_posix() for path in READMES}
    assert {".", "effects", "mla_fx", "backends", "backends/ascend/emulator", "models", "tests"} <= doors


@each_readme
def test_code_runs_and_prints_what_it_says(path: Path):
    """Blocks of Python run in order, in one scope; one marked "output" is what the Python before it printed."""
    if path == APART:
        pytest.skip("runs in a process of its own, beside the tests of the emulator")
    text = path.read_text()
    scope: dict[str, object] = {}
    printed: str | None = None
    compared = 0
    for block in BLOCK.finditer(text):
        if block["note"] == "output":
            assert printed == block["text"]
            printed, compared = None, compared + 1
        elif block["kind"] == "python" and block["note"] != "no-run":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block["text"], str(path), "exec"), scope)
            printed = out.getvalue()
            assert not printed or text[block.end() :].lstrip().startswith("<!-- output -->"), (
                "prints, and nothing says what"
            )
    assert compared == text.count("<!-- output -->")


@each_readme
def test_every_fence_is_a_block(path: Path):
    text = path.read_text()
    assert 2 * len(BLOCK.findall(text)) == len(re.findall("^```", text, re.MULTILINE))
    assert text.count("<!-- no-run -->") == sum(block["note"] == "no-run" for block in BLOCK.finditer(text))


@each_readme
def test_files_that_are_named_exist(path: Path):
    named = set(re.findall(r"`((?:mla_fx|effects|backends|models|tests)/[\w/]*(?:\.\w+)?)`", path.read_text()))
    assert not [name for name in named if not (ROOT / name).exists()]


@each_readme
def test_links_lead_somewhere(path: Path):
    targets = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    inside = [
        target.split("#")[0] for target in targets if "://" not in target and not target.startswith(("#", "mailto:"))
    ]
    assert not [target for target in inside if not (path.parent / target).exists()]


def test_commands_that_are_named_exist():
    targets = {target for path in READMES for target in re.findall(r"make (\w+)", path.read_text())}
    rules = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"decode", "generate", "test"} <= targets <= rules


def test_the_first_page_fits_on_three_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 220


WITH_EXAMPLES = [p for p in SOURCES if ">>> " in p.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_in_docstrings(path):
    inside = path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__").removeprefix("mla_fx/")
    name = "mla_fx." + inside.replace("/", ".")
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0 and result.failed == 0
