"""A model that is served with captured steps on the emulated CANN says what it says without."""

import pytest
from attrs import evolve

from mla_fx import StepShape, backends
from mla_fx.models import Engine, MtpDrafter, Request, Runner
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
    runner, found = served((1, 2, 4), drafts, quantization)
    _, right = served((), drafts, quantization)
    assert [request.new_tokens for request in found] == [request.new_tokens for request in right]
    assert [request.logprobs for request in found] == [request.logprobs for request in right]
    kinds = [key[0] for key in runner.captures.members]
    assert kinds[:3] == ["model"] * 3 and ("mtp" in kinds) == (drafts > 0)
    assert {form.single for _, form, *_ in runner.captures.members} == ({True, False} if drafts else {True})


def test_the_command_line(emulator, capsys):
    """The reference beside it is not captured."""
    where = ("--model", str(checkpoint(CONFIG).directory), "--backend", "ascend", "--emulate", "--block-size", "16")
    sizes = ("--prompt", "5", "--steps", "4", "--ranks", "2", "--requests", "2")
    lines = {}
    for capture in ((), ("--capture", "1,2,4")):
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
