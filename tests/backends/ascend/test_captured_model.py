"""A model that is served with captured steps on the emulated CANN says what it says without."""

import pytest
from attrs import evolve

from mla_fx import StepShape, backends
from mla_fx.backends.device import device
from mla_fx.effects import LawError
from mla_fx.models import Engine, MtpDrafter, Request, Runner
from mla_fx.models.capture import Form
from mla_fx.models.runner import Piece
from tests.backends.ascend.steps import LATENT
from tests.models.served import run
from tests.setups import checkpoint, model_config
from tests.test_cli import run as command

CONFIG = model_config(2, evolve(LATENT, num_attention_heads=4))
SHAPE = StepShape(ranks=2, requests=2, blocks=24, block_size=16, table_width=4, dtype="bf16")


def served(capture: tuple[int, ...], drafts: int, quantization: str | None) -> tuple[Runner, list[Request]]:
    """Requests that come and go, more than run at a time, with the logprobs of what they say."""
    backend = backends.get("ascend", ranks=2)
    shape = evolve(SHAPE, quantization=quantization)
    runner = Runner.load(checkpoint(CONFIG), backend, shape=shape, mtp=drafts > 0, capture=capture)
    engine = Engine(runner=runner, chunk=8, drafter=MtpDrafter(runner, drafts) if drafts else None)
    asked = [engine.add([k + 1, 2, 3 * k], max_new_tokens=2 + k, top_logprobs=2) for k in range(3)]
    for _ in run(engine):
        pass
    return runner, asked


@pytest.mark.parametrize(
    ("drafts", "quantization"),
    [
        (1, None),
        pytest.param(0, None, marks=pytest.mark.soak),
        pytest.param(2, "w8a8", marks=pytest.mark.soak),
    ],
)
def test_texts_and_logprobs_are_the_same(emulator, drafts, quantization):
    """Single tokens and drafts that are verified, steps of the prediction module, and some that fit no size."""
    runner, found = served((2, 4), drafts, quantization)
    _, right = served((), drafts, quantization)
    assert [request.new_tokens for request in found] == [request.new_tokens for request in right]
    assert [request.logprobs for request in found] == [request.logprobs for request in right]
    kinds, singles = ("model", "mtp") if drafts else ("model",), (True, False) if drafts else (True,)
    forms = [Form(size, single) for size in (4, 2) for single in singles]
    assert [*runner.captures.members] == [(kind, form) for form in forms for kind in kinds]


def test_one_block_of_scratch_for_all_that_is_known_before(emulator, monkeypatch):
    """A step larger than any that was told of gets a block beside it; where the one there grows, the law refuses it."""
    monkeypatch.setattr(device("npu"), "scratch", {})
    runner = Runner.load(checkpoint(CONFIG), backends.get("ascend", ranks=2), shape=SHAPE, mtp=True, capture=(2,))
    engine = Engine(runner=runner, chunk=16, drafter=MtpDrafter(runner))
    engine.add([3] * 20, max_new_tokens=4)
    assert sum(len(output.tokens) for output in run(engine)) == 4
    blocks = runner.backend.device.scratch.values()
    assert len(blocks) == 2 and not any(block.beside for block in blocks)

    def fill(count: int) -> None:
        runner.forward([[Piece(tokens=[1] * count, start=0, table=[0, 1])]], [[count - 1]], filling=True)

    fill(32)
    assert all(block.beside for block in blocks)
    for block in blocks:
        monkeypatch.setattr(block, "captured", False)
    with pytest.raises(LawError, match=r"rule 10: replay model\d+ .* run model\d+ .* has made it grow"):
        fill(64)


def test_the_command_line(emulator, capsys):
    """The reference beside it is not captured."""
    where = ("--model", str(checkpoint(CONFIG).directory), "--backend", "ascend", "--emulate", "--block-size", "16")
    sizes = ("--prompt", "5", "--steps", "3", "--ranks", "2", "--requests", "2")
    lines = {}
    for capture in ((), ("--capture", "1,2", "--capture-contexts", "32")):
        status, out, _ = command(capsys, "decode", *where, *sizes, *capture)
        assert status == 0
        lines[capture] = [line for line in out.splitlines() if "deviation" in line]
    assert len(lines[()]) == 1 and len({tuple(found) for found in lines.values()}) == 1


def test_float32_on_the_command_line_is_refused_with_the_reason(emulator, capsys):
    status, _, err = command(capsys, "generate", "--backend", "ascend", "--emulate", "--capture", "1,2")
    assert status == 2 and "capture: history_attention cannot be updated: its attention in fp32 is plain torch" in err
    with pytest.raises(SystemExit):
        command(capsys, "generate", "--capture", "1,0")
    assert "argument --capture: must be an integer of at least 1: got '0'" in capsys.readouterr().err
