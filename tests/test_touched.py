"""How many files one touches to add an op, counted for those that are there.

An op stands in the files of its stem, in every file with a line of its own for
it (the list of ops, a table of rules or of tests, an export, a row of a
README), and in the file of `mla_fx` that binds it.  What merely calls that
function needs no change for the op to be there, and is not counted.
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

import pytest

from mla_fx.backends import ascend
from mla_fx.backends.ascend.fused import write_rows_pair
from mla_fx.effects import Op, ops
from mla_fx.effects.op import stem
from tests.test_imports import ROOT, SOURCES
from tests.test_readme import READMES

TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (*SOURCES, *(ROOT / "tests").rglob("*.py"), *READMES)
}


def touched(op: type[Op], texts: Mapping[str, str] = TEXTS) -> set[str]:
    """The files that define an op or register it."""
    name, word = op.__name__, stem(op)
    imported = rf"from \S+ import ({name}|{word})\b.*|    {word},"
    row = rf"\s*([\w.]+\.)?{name}(:.*|,)|\| `{word}` \|.*"
    found = set()
    for place, text in texts.items():
        path = PurePosixPath(place)
        own = path.stem.removeprefix("test_") == word and path.parts[0] != "mla_fx"
        if not (own or name in text or word in text):
            continue
        exported = path.name == "__init__.py" and re.search(rf"^({imported})$", text, re.MULTILINE)
        bound = path.parts[0] == "mla_fx" and f"ops.{name}(" in text and "bind(" in text  # a pass writes equations
        if own or exported or bound or re.search(rf"^({row})$", text, re.MULTILINE):
            found.add(place)
    return found


def test_a_local_op():
    """File, list, wrapper, export, rule, table, test; all backends run that rule, and so does the reference."""
    assert touched(ops.TakeRows) == {
        "effects/ops/take_rows.py",
        "effects/ops/__init__.py",
        "mla_fx/projections.py",
        "mla_fx/__init__.py",
        "backends/common/take_rows.py",
        "backends/common/__init__.py",
        "tests/ops/test_take_rows.py",
    }


def test_a_collective():
    """As a local op, both halves in its rule, and with sizes, since it has parameters."""
    assert touched(ops.AllGather) == {
        "effects/ops/all_gather.py",
        "effects/ops/__init__.py",
        "mla_fx/exchange.py",
        "mla_fx/__init__.py",
        "backends/common/all_gather.py",
        "backends/common/__init__.py",
        "tests/ops/test_all_gather.py",
        "tests/backends/sizes.py",
    }


def test_a_fused_op_of_one_backend():
    """One file, and its test: what lies in the folder is on."""
    assert touched(write_rows_pair.WriteRowsPair) == {
        "backends/ascend/fused/write_rows_pair.py",
        "tests/backends/ascend/test_write_rows_pair.py",
    }
    assert write_rows_pair.FUSION in ascend.fused.ALL and write_rows_pair.find in ascend.TABLE.passes


@pytest.mark.parametrize("op", ops.ALL, ids=stem)
def test_no_op_stands_in_more_files_than_its_rules_ask_for(op):
    """Eight at most where every rule is shared; a backend with a rule of its own for it adds that and a table."""
    found = touched(op)
    own = [place for place in found if re.fullmatch(r"backends/(?!common/)\w+/(?!__init__)\w+\.py", place)]
    assert len(found) <= 8 + 2 * len(own)


def test_every_place_counts():
    """Each kind of place by itself; what calls the wrapper is none."""
    places = {
        "effects/ops/take_rows.py": "",
        "tests/ops/test_take_rows.py": "",
        "effects/ops/__init__.py": "from mla_fx.effects.ops.take_rows import TakeRows as TakeRows\n",
        "backends/mine/__init__.py": "from a import (\n    take_rows,\n)\n",
        "tests/table.py": "SIZES = {\n    ops.TakeRows: 3,\n}\n",
        "tests/list.py": "SOME = (\n    ops.TakeRows,\n)\n",
        "README.md": "| `take_rows` | rows |\n",
        "mla_fx/rows.py": "def rows(x):\n    return bind(ops.TakeRows(), x)\n",
    }
    others = {"models/stack.py": "from mla_fx import take_rows\nx = take_rows(y)\n", "mla_fx/take_rows.py": "1"}
    assert touched(ops.TakeRows, places | others) == set(places)
