"""The README runs: its code, its printed output, its table of ops, the files it names; and so do all doctests."""

import contextlib
import doctest
import importlib
import io
import re

import pytest

from mla_fx.effects import ops
from mla_fx.effects.op import stem
from tests.test_imports import ROOT, SOURCES

README = (ROOT / "README.md").read_text()
BLOCK = re.compile(
    r"(?:<!-- (?P<note>output|no-run) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


def run(text: str) -> int:
    """Run the blocks of Python in order, in one scope; one marked "output" is what the Python before it printed.

    Returns how many outputs were compared.
    """
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
                exec(compile(block["text"], "README.md", "exec"), scope)
            printed = out.getvalue()
            assert not printed or text[block.end() :].lstrip().startswith("<!-- output -->"), (
                "prints, and nothing says what"
            )
    return compared


def test_code_runs_and_prints_what_it_says():
    assert run(README) == README.count("<!-- output -->") >= 5


def test_every_fence_is_a_block():
    assert 2 * len(BLOCK.findall(README)) == len(re.findall("^```", README, re.MULTILINE))
    assert README.count("<!-- no-run -->") == sum(block["note"] == "no-run" for block in BLOCK.finditer(README))


def test_files_that_are_named_exist():
    named = set(re.findall(r"`((?:mla_fx|effects|backends|models|tests)/[\w/]*(?:\.\w+)?)`", README))
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / name).exists()]


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)\s]+)\)", README)
    inside = [
        target.split("#")[0] for target in targets if "://" not in target and not target.startswith(("#", "mailto:"))
    ]
    assert not [target for target in inside if not (ROOT / target).exists()]


def test_commands_that_are_named_exist():
    targets = set(re.findall(r"make (\w+)", README))
    rules = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"decode", "test"} <= targets <= rules


def test_table_of_ops_is_whole():
    rows = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert sorted(rows) == sorted(map(stem, ops.ALL))


WITH_EXAMPLES = [p for p in SOURCES if ">>> " in p.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_in_docstrings(path):
    inside = path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__").removeprefix("mla_fx/")
    name = "mla_fx." + inside.replace("/", ".")
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0 and result.failed == 0
