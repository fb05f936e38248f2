"""The README's lines for Ascend run, after all that stands before them, and print what they say."""

import contextlib
import io

import pytest
from torch import Tensor

from tests.test_readme import BLOCK, README

pytestmark = pytest.mark.usefixtures("emulator")


def test_the_example_prints_what_it_says():
    scope: dict[str, object] = {}
    blocks = iter([block for block in BLOCK.finditer(README) if block["note"] != "output"])
    for block in blocks:
        printed = io.StringIO()
        if block["kind"] == "python":
            with contextlib.redirect_stdout(printed):
                exec(compile(block["text"], "README.md", "exec"), scope)
        if "emulate(" in block["text"]:
            break
    assert isinstance(scope["exact"], Tensor)
    assert printed.getvalue() == next(blocks)["text"] == "True\n"
