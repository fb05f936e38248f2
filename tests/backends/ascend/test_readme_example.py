"""The README's lines for Ascend run, on a program and parameters of the one who reads them."""

import pytest
import torch

from mla_fx import backends, orchestrations
from mla_fx.backends import Executable
from mla_fx.effects import schedule
from tests.backends.ascend.steps import setup
from tests.test_imports import ROOT
from tests.test_readme import BLOCK

pytestmark = pytest.mark.usefixtures("emulator")
README = (ROOT / "backends" / "README.md").read_text()


def test_the_example_runs():
    given = setup("fp32", ranks=4)
    program = schedule(given.step, orchestrations.attention_aside)
    (text,) = [block["text"] for block in BLOCK.finditer(README) if "emulate(" in block["text"]]
    prepared = backends.get("ascend", ranks=4).prepare(program, given.params())
    scope = {"backends": backends, "program": program, "prepared": prepared}
    exec(compile(text, "README.md", "exec"), scope)
    run, exact = scope["run"], backends.get("reference", ranks=4)
    assert isinstance(run, Executable)
    out, _ = run(*backends.get("ascend", ranks=4).put(given.arguments(), copy=True))
    want, _ = given.compiled(exact, program)(*exact.put(given.arguments(), copy=True))
    torch.testing.assert_close(out[0].cpu().double(), want[0], rtol=0, atol=2e-5)
