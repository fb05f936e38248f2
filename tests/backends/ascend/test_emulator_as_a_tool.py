"""The emulator for other people's code: its README, operators that they add, the command, what a call launches."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla_fx.backends.ascend.emulator import emulate, operator
from mla_fx.backends.ascend.emulator.__main__ import main
from mla_fx.backends.ascend.emulator.releases import NEWEST
from mla_fx.effects import InputError
from tests.backends.ascend import ranks as do
from tests.backends.ascend.legal import make, there
from tests.test_imports import ROOT

pytestmark = pytest.mark.usefixtures("emulator")
README = (Path(operator.__file__ or "").parent / "README.md").read_text()


def test_the_readme_runs_and_prints_what_it_says(processes):
    """In a process of its own: what it adds to the table stays there."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE))
    printed = "".join(re.findall(r"^```text\n(.*?)^```$", README, re.DOTALL | re.MULTILINE))
    assert processes.run(do.printed, ranks=1, code=code) == [printed] and printed.count("\n") > 8


# --- the command ----------------------------------------------------------------------

COMMAND = ("-m", "mla_fx.backends.ascend.emulator")
SCRIPT = """
import sys
import torch, torch_npu
if __name__ == "__main__":
    x = torch.ones(2, device="npu")
    print(sys.argv[1:], (x + 1).tolist(), torch_npu.npu.utils.get_cann_version())
    from mla_fx.backends.ascend.emulator import emulate
    emulate(cann="9.1")
    print(torch_npu.npu.utils.get_cann_version())
    with torch.npu.stream(torch.npu.Stream()):
        late = torch.ones(4, device="npu") + 1
"""


@pytest.fixture
def script(tmp_path) -> Path:
    (tmp_path / "their_script.py").write_text(SCRIPT)
    return tmp_path


def test_code_that_knows_nothing_of_it_runs_over_it(script):
    """The wheel keeps the release that is loaded first, whatever is played later, and says nothing of its start; the
    process ends in peace, with a stream, a tensor and tasks that never ran."""
    command = [sys.executable, *COMMAND, "--cann", "8.5", "their_script.py", "--seed", "x"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=script, env=environment)
    assert done.stdout == "['--seed', 'x'] [2.0, 2.0] 8.5.0\n8.5.0\n", done.stderr
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.cann(NEWEST)
def test_a_module_runs_over_it_too(emulator, script, monkeypatch, capsys):
    monkeypatch.chdir(script)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    assert main(["-m", "their_script", "--seed", "x"]) == 0
    assert capsys.readouterr().out.startswith("['--seed', 'x'] [2.0, 2.0] ")


@pytest.mark.parametrize(
    ("given", "message"),
    [([], "name a script, or a module with -m"), (["--cann", "7", "x.py"], "invalid choice: '7'")],
)
def test_a_command_that_is_wrong(capsys, given, message):
    with pytest.raises(SystemExit) as ended:
        main(given)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and message in told and "usage: python -m mla_fx" in told


def test_a_command_that_cannot_emulate(capsys, monkeypatch):
    def fails(**how):
        raise InputError("torch_npu: is not there")

    monkeypatch.setattr("mla_fx.backends.ascend.emulator.__main__.emulate", fails)
    assert main(["x.py"]) == 2 and capsys.readouterr().err == "torch_npu: is not there\n"


# --- operators that a user adds --------------------------------------------------------


@pytest.fixture
def sinh(emulator):
    """An operator that is not in the table, and is not there for long."""
    yield "aclnnSinh"
    emulator._added.pop("aclnnSinh", None)


def test_an_operator_that_a_user_adds(emulator, sinh):
    x = torch.tensor([0.0, 1.0]).npu()

    @emulator.operator(sinh, "T O")
    def first(a, out):
        out.copy_(a.sinh())

    torch.testing.assert_close(torch.sinh(x).cpu(), torch.sinh(x.cpu()))
    emulate(cann="8.5")  # it is there in every release
    assert torch.sinh(x).cpu()[1] > 1

    @emulator.operator(sinh, "T O", lies=operator.any_strides)
    def second(a, out):
        out.fill_(7)

    assert torch.sinh(x).cpu().tolist() == [7.0, 7.0]
    assert first is not second  # the decorator gives back what it decorates


def test_operators_that_cannot_be_added(emulator):
    with pytest.raises(InputError, match="name: must be an operator that the wheel looks up: got aclnnNone"):
        emulator.operator("aclnnNone", "T O")
    with pytest.raises(InputError, match=r"signature: must consist of T O L W D .*: got X"):
        emulator.operator("aclnnTan", "T X")


def test_a_result_whose_shape_the_operator_decides():
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).npu()
    assert torch.masked_select(x, x > 0).tolist() == [1.0, 2.0]
    assert torch.nonzero(x).tolist() == [[0, 0], [1, 1]] and torch.nonzero(x > 9).shape == (0, 2)


# --- what a call launches --------------------------------------------------------------


def kernels(emulator, call) -> dict[str, int]:
    call()  # constants
    with emulator.tracing() as trace:
        call()
    return {task.name: task.kernels for task in trace if task.kind == "operator"}


def test_operands_that_are_made_contiguous_first_are_kernels_more(emulator):
    square, wide = there(4, 4, dtype=torch.float32), there(4, 8, dtype=torch.float32)
    strided = wide[:, ::2]
    assert kernels(emulator, lambda: torch.exp(square)) == {"aclnnExp": 1}
    assert kernels(emulator, lambda: torch.exp(strided)) == {"aclnnExp": 2}
    assert kernels(emulator, lambda: strided + square) == {"aclnnAdd": 2}
    assert kernels(emulator, lambda: torch.cat((strided, square, strided))) == {"aclnnCat": 3}
    assert kernels(emulator, lambda: torch.exp(square, out=strided)) == {"aclnnExp": 2}  # copied to where it lies
    assert kernels(emulator, lambda: strided.exp_()) == {"aclnnInplaceExp": 3}  # there and back
    assert kernels(emulator, lambda: wide[2:4, :].exp()) == {"aclnnExp": 1}  # a part that is contiguous
    assert kernels(emulator, lambda: square.copy_(strided)) == {"aclnnInplaceCopy": 1}  # the copy itself
    assert kernels(emulator, lambda: square @ square.t()) == {"aclnnMatmul": 1}  # a matrix may come transposed
    assert kernels(emulator, lambda: square @ strided) == {"aclnnMatmul": 2}


def test_strided_parts_of_a_merge_are_a_copy_each(emulator):
    parts = [there(4, 2, 8)[:, k] for k in range(2)]
    assert kernels(emulator, lambda: make("update", {"local_out": parts}))["aclnnAttentionUpdate"] == 3
    assert kernels(emulator, lambda: make("update", {}))["aclnnAttentionUpdate"] == 1
