"""The README of `models` runs, and names every file of the folder."""

import re

from tests.test_imports import ROOT
from tests.test_readme import BLOCK, run

FOLDER = ROOT / "models"
TEXT = (FOLDER / "README.md").read_text()


def test_code_runs_and_prints_what_it_says():
    assert run(TEXT) == TEXT.count("<!-- output -->") >= 2
    assert 2 * len(BLOCK.findall(TEXT)) == len(re.findall("^```", TEXT, re.MULTILINE))


def test_every_file_is_in_the_table():
    named = set(re.findall(r"`(\w+\.py)`", TEXT))
    assert named == {path.name for path in FOLDER.glob("*.py")} - {"__init__.py"}


def test_files_that_are_named_exist():
    named = set(re.findall(r"`((?:mla_fx|models|tests)/[\w/]*\.\w+)`", TEXT))
    assert len(named) >= 3 and not [name for name in named if not (ROOT / name).exists()]
