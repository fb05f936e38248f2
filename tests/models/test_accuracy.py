"""What the trained model answers to 100 held-out problems: right, and as often whatever runs it.

The README of `models`'s table is what this test finds.
"""

import re

import pytest

from mla_fx import StepShape, backends
from mla_fx.models import Checkpoint, Engine, Runner
from mla_fx.models.addition import DIRECTORY, held_out, problems
from mla_fx.models.tokenizer import Tokenizer
from tests.cases import mostly_soak
from tests.test_imports import ROOT

PROBLEMS = problems(100, seed=1)
CHECKPOINT, TOKENIZER = Checkpoint.open(DIRECTORY), Tokenizer(DIRECTORY)
#: Name in the README's table: dtype of the activations, quantisation of the weights.
PRECISIONS = {"fp32": ("fp32", None), "bf16": ("bf16", None), "fp16": ("fp16", None), "W8A8": ("bf16", "w8a8")}


def solved(precision: str, ranks: int) -> list[bool]:
    """Which problems are answered exactly, decoding greedily to the end token."""
    dtype, quantization = PRECISIONS[precision]
    shape = StepShape(
        ranks=ranks,
        requests=50,
        blocks=200 // ranks + 50,
        block_size=16,
        table_width=2,
        dtype=dtype,
        quantization=quantization,
    )
    runner = Runner.load(CHECKPOINT, backends.get("cpu", ranks=ranks), shape=shape)
    engine = Engine(runner=runner, chunk=512, end=CHECKPOINT.config.eos_token_id)
    requests = [engine.add(TOKENIZER.encode(prompt), max_new_tokens=8) for prompt, _ in PROBLEMS]
    list(engine.run())
    end = CHECKPOINT.config.eos_token_id[0]
    return [
        request.new_tokens[-1] == end and TOKENIZER.decode(request.new_tokens) == answer
        for request, (_, answer) in zip(requests, PROBLEMS, strict=True)
    ]


@pytest.mark.parametrize("precision", mostly_soak(PRECISIONS, ["bf16"]))
def test_accuracy_is_high_and_does_not_depend_on_the_ranks(precision):
    one, eight = solved(precision, 1), solved(precision, 8)
    assert sum(one) == sum(eight) >= 98
    row = re.search(rf"\| {precision} \| (\d+) \| (\d+) \|", (ROOT / "models/README.md").read_text())
    assert row and [int(number) for number in row.groups()] == [sum(one), sum(eight)]


def test_problems_are_held_out_and_right():
    assert len(set(PROBLEMS)) == 100
    for prompt, answer in PROBLEMS:
        a, b = map(int, re.fullmatch(r"(\d+) \+ (\d+) =", prompt).groups())
        assert a + b == int(answer) and held_out(a, b)
    assert len({len(answer) for _, answer in PROBLEMS}) == 4  # sums of one to four digits
