"""The command line on the emulated Ascend: decoding, generating, the device trace, and errors."""

import re

import pytest
from attrs import evolve

from mla_fx import models
from mla_fx.backends.ascend.emulator.releases import NEWEST, RELEASES
from mla_fx.models import deepseek_v3_config
from mla_fx.models.addition import problems
from tests.cases import mostly_soak
from tests.test_cli import deviation, run
from tests.test_cli_generate import ANSWERS, PROMPTS, texts

ASCEND = ("--backend", "ascend", "--emulate")


@pytest.mark.parametrize("release", mostly_soak(RELEASES, [NEWEST]), indirect=True)
def test_decode(capsys, release):
    """The built-in model's sizes are not those of the attention operator, so it runs in float32."""
    status, out, _ = run(capsys, "decode", *ASCEND, "--ranks", "2", "--adversary", "3")
    assert status == 0 and "ascend, 2 ranks, fp32, attention-aside (minimal)" in out and deviation(out) < 1e-4
    for prompt, answer in problems(2):
        assert f"{prompt} {answer}\n" in out


def test_generate(capsys, emulator):
    status, out, _ = run(capsys, "generate", "--prompt", PROMPTS[0], *ASCEND)
    assert status == 0 and texts(out) == [(PROMPTS[0], ANSWERS[0])]


def test_generate_with_drafts_and_8_bits(capsys, emulator):
    asked = [argument for prompt in PROMPTS[1:] for argument in ("--prompt", prompt)]
    status, out, _ = run(capsys, "generate", *asked, *ASCEND, "--drafts", "2", "--quantization", "w8a8")
    assert status == 0 and texts(out) == list(zip(PROMPTS[1:], ANSWERS[1:], strict=True))


def test_device_trace(capsys, emulator, monkeypatch):
    """History on main, current attention on side between the two events, the exchange as integers, no cast between."""
    v3 = deepseek_v3_config()
    narrow = evolve(v3, attention=evolve(v3.attention, hidden_size=256, q_lora_rank=128))
    monkeypatch.setattr(models, "deepseek_v3_config", lambda: narrow)
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
