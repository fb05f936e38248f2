"""Everything that the emulated operators refuse is refused in a test, through the wheel, by the release that does."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from mla_fx.backends.ascend.emulator import operator
from mla_fx.backends.ascend.emulator.releases import RELEASES
from tests.backends.ascend import attention_refusals, expert_refusals, refusals
from tests.backends.ascend.legal import LEGAL, make

pytestmark = pytest.mark.usefixtures("emulator")
PACKAGE = operator.__name__.rpartition(".")[0]
FOLDER = Path(operator.__file__ or "").parent
HELPERS = ("require", "tiling")
TABLE = {**attention_refusals.TABLE, **refusals.TABLE, **expert_refusals.TABLE}


@pytest.mark.parametrize("call", LEGAL)
def test_the_legal_call_is_legal(emulator, release, call):
    make(call, {})
    emulator.synchronize()


def sites(module: str) -> dict[int, int]:
    """Every line of a module on which it may refuse, to the first line of the refusal."""
    found = {}
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in HELPERS:
            found |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.lineno)
    return found


def test_the_table_has_every_module_that_refuses():
    assert {path.stem for path in FOLDER.glob("*.py") if path.stem != "operator" and sites(path.stem)} == set(TABLE)


@pytest.mark.parametrize("module", TABLE)
def test_every_refusal_is_uttered(emulator, monkeypatch, module):
    """Each row is refused with its message, from a place in its module; together they come from all of its places."""
    file = importlib.import_module(f"{PACKAGE}.{module}").__file__
    places: list[int] = []

    class Noted(operator.RefusedError):
        def __init__(self, message, status=operator.INVALID_ARGUMENT):
            super().__init__(message, status)
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_name in HELPERS:
                frame = frame.f_back
            if frame is not None and frame.f_code.co_filename == file:
                places.append(frame.f_lineno)

    monkeypatch.setattr(operator, "RefusedError", Noted)
    lines, uttered = sites(module), set()
    for row in TABLE[module]:
        emulator.play(RELEASES[row.cann])
        places.clear()
        with pytest.raises(RuntimeError, match=row.message):
            row.run()
        assert places, f"{row.message}: not refused by {module}"
        uttered.add(lines[places[0]])
    assert sorted(set(lines.values()) - uttered) == []
