"""The command line on the emulated Ascend: decoding, generating, the device trace, and errors."""

import os
import re
import subprocess
import sys

import pytest

from mla_fx.models.addition import problems
from tests.test_cli import deviation, run
from tests.test_cli_generate import ANSWERS, PROMPTS, texts
from tests.test_imports import ROOT

ASCEND = ("--backend", "ascend", "--emulate")


def test_decode(capsys, emulator):
    """The built-in model's sizes are not those of the attention operator, so it runs in float32."""
    status, out, _ = run(capsys, "decode", *ASCEND, "--ranks", "4", "--adversary", "3")
    assert status == 0 and "ascend, 4 ranks, fp32, attention-aside (minimal)" in out and deviation(out) < 1e-4
    for prompt, answer in problems(2):
        assert f"{prompt} {answer}\n" in out


@pytest.mark.parametrize("options", [(), ("--drafts", "2", "--quantization", "w8a8")], ids=["plain", "drafts, W8A8"])
def test_generate(capsys, emulator, options):
    asked = [argument for prompt in PROMPTS for argument in ("--prompt", prompt)]
    status, out, _ = run(capsys, "generate", *asked, *ASCEND, *options)
    assert status == 0 and texts(out) == list(zip(PROMPTS, ANSWERS, strict=True))


def test_device_trace(capsys, emulator):
    """History on main, current attention on side between the two events, the exchange as integers, no cast between."""
    status, out, _ = run(capsys, "show", "--ranks", "1", "--tokens", "2", "--device-trace", "--seed", "4")
    lines = out.splitlines()
    main = [line.removeprefix("main  ") for line in lines if line.startswith("main")]
    side = [line.removeprefix("side  ") for line in lines if line.startswith("side")]
    assert status == 0 and len(side) == 3
    assert side[0] == "wait e0" and side[1].startswith("FusedInferAttentionScoreV4") and side[2] == "record e1"
    first = next(k for k, line in enumerate(main) if line.startswith("FusedInferAttentionScoreV4"))
    assert "-> bfloat16[2, 128, 512], float32[2, 128, 1]" in main[first] and main[first + 1] == "record e0"
    assert any(line.startswith("Stack -> int16[1, 131584]") for line in main)
    assert re.fullmatch(r"\d+ tasks of 1 ranks: \d+ operators in \d+ kernels, \d+ bytes copied beside them", lines[-1])
    operators, kernels = map(int, re.findall(r"(\d+) (?:operators|kernels)", lines[-1]))
    assert kernels > operators  # parts of a projection are made contiguous in a kernel of their own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--emulate"), "--emulate: is for --backend ascend: got --backend cpu"),
        (("decode", *ASCEND, "--dtype", "bf16"), "history_attention: L: attention on ascend in bf16 needs 512"),
        (
            ("show", "--device-trace", "--layers", "2"),
            "--device-trace: runs the attention of one layer: got --layers 2",
        ),
        (("show", "--device-trace", "--tokens", "99"), "--device-trace: takes at most 16 tokens: got --tokens 99"),
    ],
)
def test_errors_name_the_field(capsys, emulator, arguments, message):
    status, _, err = run(capsys, *arguments)
    assert status == 2 and f"mla-fx {arguments[0]}: " in err and message in err


def test_without_emulation_and_without_cann_it_says_what_is_missing(machine):
    """In a process of its own, where nothing is emulated."""
    code = "from mla_fx.cli import main; raise SystemExit(main(['decode', '--backend', 'ascend']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "ascend needs torch_npu==2.13.0" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("first", ["import torch", "import mla_fx", "from transformers import DeepseekV3ForCausalLM"])
def test_whatever_is_imported_first_leaves_torch_npu_alone(machine, first):
    """With the wheel here for the emulator, without CANN, and without a variable that says so."""
    code = f"{first}; import mla_fx, os, sys; assert 'torch_npu' not in sys.modules"
    clean = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stderr


def test_processes_that_are_started_from_an_emulated_one_may_import_torch(machine):
    """A spawned process gets the path of the one that spawns it."""
    code = """
import importlib, multiprocessing
if __name__ == "__main__":
    from mla_fx.backends.ascend.emulator import emulate
    emulate()
    process = multiprocessing.get_context("spawn").Process(target=importlib.import_module, args=("torch",))
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
