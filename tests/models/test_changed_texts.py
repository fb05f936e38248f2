"""Where a text depends on how it is run: never in float32; in 16 bits and in 8 some, and here is how many.

A sum of the same numbers in another order, or of another shape, is rounded otherwise; where two tokens are nearly as
likely, the other one may come out, and the text goes on from there.  Ranks split sums; chunks, company and drafts
change shapes; and with int8 weights an activation's scale is that of the row as a rank has it.  The model has random
weights, so its choices are much closer than a trained model's: `test_accuracy` has that.  `models/README.md` names the
shares.
"""

import functools
import re

import pytest

from mla_fx import StepShape, backends
from mla_fx.models import Checkpoint, Engine, MtpDrafter, Runner
from tests.cases import mostly_soak
from tests.models.served import random_prompts, small
from tests.test_imports import ROOT

PROMPTS = random_prompts(32, seed=40)
COUNT = 12
PRECISIONS = {"fp32": ("fp32", None), "bf16": ("bf16", None), "W8A8": ("bf16", "w8a8")}
#: The README of `models`'s sentence, and by how much another machine's sums may differ from those it was measured with.
README = (
    r"(?P<bf16>\d+) % of texts changed in bf16 and (?P<W8A8>\d+) % in W8A8 from 1 rank to 4, "
    r"(?P<bf16_drafts>\d+) % and (?P<W8A8_drafts>\d+) % with drafts"
)
SLACK = 0.2
#: What changes how a text is run: ranks, requests beside each other, tokens of a step, drafts.
WAYS = {"drafts": (1, 4, 64, 2), "ranks": (4, 4, 64, 0), "chunks": (1, 4, 5, 0), "company": (1, 2, 64, 0)}


@functools.cache
def served(precision, ranks, requests, chunk, drafts):
    dtype, quantization = PRECISIONS[precision]
    shape = StepShape(
        ranks=ranks,
        requests=requests,
        blocks=64,
        block_size=4,
        table_width=16,
        dtype=dtype,
        quantization=quantization,
    )
    machine = backends.get("cpu", ranks=ranks)
    runner = Runner.load(Checkpoint.open(small()), machine, shape=shape, mtp=drafts > 0)
    engine = Engine(runner=runner, chunk=chunk, drafter=MtpDrafter(runner, drafts) if drafts else None)
    requests = [engine.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS]
    list(engine.run())
    return [request.new_tokens for request in requests]


def changed(precision, way):
    """The share of texts that are not those of one rank, four requests at a time, whole prompts, no drafts."""
    pairs = zip(served(precision, 1, 4, 64, 0), served(precision, *WAYS[way]), strict=True)
    return sum(one != other for one, other in pairs) / len(PROMPTS)


@pytest.mark.parametrize(
    ("precision", "ways"),
    mostly_soak([*((p, (*WAYS,)) for p in PRECISIONS), ("bf16", ("ranks", "drafts"))], [("bf16", ("ranks", "drafts"))]),
)
def test_texts_that_change(precision, ways):
    """In every run what the README says of bf16; in float32 `test_independence` has a bounded sample."""
    found = {way: changed(precision, way) for way in ways}
    print(f"\n{precision}: " + ", ".join(f"{way} {share:.0%}" for way, share in found.items()))
    if precision == "fp32":
        assert not any(found.values())
        return
    readme = " ".join((ROOT / "models/README.md").read_text().split())
    ranks, drafts = map(re.compile(README).search(readme).group, (precision, f"{precision}_drafts"))
    assert found["ranks"] == max(found.values())
    assert abs(found["ranks"] - int(ranks) / 100) < SLACK and abs(found["drafts"] - int(drafts) / 100) < SLACK
