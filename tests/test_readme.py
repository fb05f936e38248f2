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
BLOCK = re.compile(r"(?P<note><!-- (?P<comment>[\w -]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL)


def test_code_runs_and_prints_what_it_says():
    scope: dict[str, object] = {}
    printed, ran, compared = "", 0, 0
    for block in BLOCK.finditer(README):
        if block["kind"] == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block["text"], "README.md", "exec"), scope)
            printed, ran = out.getvalue(), ran + 1
        elif block["comment"] == "output":
            assert printed == block["text"]
            compared += 1
    assert (ran, compared) == (README.count("```python"), README.count("<!-- output -->"))
    assert compared >= 5


def test_files_that_are_named_exist():
    named = set(re.findall(r"`((?:mla_fx|effects|backends|models|tests)/[\w/]*(?:\.py)?)`", README))
    assert len(named) > 5
    for name in named:
        assert (ROOT / name).exists(), name


def test_commands_that_are_named_exist():
    targets = set(re.findall(r"make (\w+)", README))
    rules = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets and targets <= rules


def test_table_of_ops_is_whole():
    rows = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert sorted(rows) == sorted(map(stem, ops.ALL))


WITH_EXAMPLES = [p for p in SOURCES if ">>> " in p.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_in_docstrings(path):
    name = "mla_fx." + str(path.relative_to(ROOT).with_suffix("")).removeprefix("mla_fx/").replace("/", ".")
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0 and result.failed == 0
