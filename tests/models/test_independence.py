"""The greedy text in float32 is the same however they are run: ranks, layout, chunks, company, streams, drafts.

One run is compared with the dense model, all others with that run.  The plain
suite takes the beginning of five runs, which have every choice; the soak run those
in which every two meet, and all combinations.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
import torch

from mla_fx import orchestrations
from mla_fx.models import Engine, MtpDrafter
from mla_fx.models.runner import Piece
from tests.cases import mostly_soak, pairwise
from tests.models.served import finish, make_runner, oracle, random_prompts, small
from tests.setups import ANYWHERE

PROMPT: Final = torch.randint(64, (110,), generator=torch.Generator().manual_seed(103)).tolist()
COUNT: Final = 150
BLOCK: Final = 16
#: Lengths at which blocks, and rounds over ranks, begin and end.
CROSSED: Final = (127, 128, 129, 255, 256, 257)
#: The closest two logits of the path are apart by more than this, and float32 errs by far less.
MARGIN: Final = 2e-3

AXES: Final[Mapping[str, Sequence[Any]]] = {
    "ranks": (1, 2, 4, 8),
    "orchestration": ANYWHERE,  # all others are the serial one's bits too, step by step
    "chunk": (5, 16, 512),
    "interleave": (1, BLOCK),
    "company": (False, True),
    "mode": ("minimal", "conservative"),
    "drafts": (0, 2),
}
#: What the long run goes through.
ALL: Final[Mapping[str, Sequence[Any]]] = {**AXES, "orchestration": tuple(orchestrations.NAMED)}


def label(choice: Mapping[str, Any]) -> str:
    return "-".join(map(str, choice.values()))


#: The first of them have the most pairs, and are run in every suite, for the first tokens.
RUNS: Final = [dict(zip(AXES, case, strict=True)) for case in pairwise(**AXES)[1]]
SAMPLE, FIRST = 5, 24


def serve(
    *,
    ranks: int,
    orchestration: str,
    chunk: int,
    interleave: int,
    company: bool,
    mode: str,
    drafts: int,
    count: int = COUNT,
) -> tuple[list[int], list[int]]:
    """The tokens behind the prompt, and the number of requests that run beside each other at each step."""
    chosen = orchestrations.NAMED[orchestration]
    runner = make_runner(
        small(),
        ranks=ranks,
        requests=3 if company else 1,
        blocks=64,
        block_size=BLOCK,
        table_width=20,
        interleave=interleave,
        orchestration=chosen,
        prefill_orchestration=chosen,
        mode=mode,
        mtp=drafts > 0,
    )
    engine = Engine(runner=runner, chunk=chunk, drafter=MtpDrafter(runner, drafts) if drafts else None)
    lengths = [(prompt, min(5 + 3 * len(prompt), count)) for prompt in random_prompts(2 + count // 15, seed=2)]
    others = lengths if company else []
    for prompt, count in others[:2]:
        engine.add(prompt, max_new_tokens=count)
    request = engine.add(PROMPT, max_new_tokens=count)
    for prompt, count in others[2:]:
        engine.add(prompt, max_new_tokens=count)
    together = []
    while engine.busy:
        together.append(len({*(r.number for r in engine.running), *(o.request.number for o in engine.step())}))
    return request.new_tokens, together


@pytest.fixture(scope="module")
def baseline() -> list[int]:
    """One rank, the prompt at once, one stream."""
    runner = make_runner(small(), block_size=BLOCK, table_width=20, orchestration=orchestrations.serial)
    (tokens,) = finish(Engine(runner=runner, chunk=512), [PROMPT], COUNT)
    return tokens


def test_the_baseline_is_the_dense_model(baseline):
    """At every position the dense model, given the text so far, says what was generated; no choice is a close one."""
    text = [*PROMPT, *baseline]
    assert len(baseline) == COUNT
    assert all(len(PROMPT) < length < len(text) for length in CROSSED)
    assert len({tuple(baseline[i : i + 4]) for i in range(COUNT)}) > 60  # it does not go round in a small circle
    logits, _ = oracle(small())(text)
    logits = logits[len(PROMPT) - 1 : -1]
    assert logits.argmax(1).tolist() == baseline
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > MARGIN


@pytest.mark.parametrize("ranks", [1, 8])
def test_float32_errs_by_far_less_than_the_margin(baseline, ranks):
    """The whole path in one step, beside the dense model: what rounding makes of its logits."""
    text = [*PROMPT, *baseline][:-1]
    runner = make_runner(small(), ranks=ranks, block_size=BLOCK, table_width=20)
    (found,), _ = runner.forward([[Piece(tokens=text, start=0, table=range(20))]], [range(len(text))], filling=True)
    error = (found - oracle(small())(text)[0]).abs().max()
    assert error < MARGIN / 50


@pytest.mark.parametrize("interleave", AXES["interleave"])
@pytest.mark.parametrize("ranks", AXES["ranks"])
def test_logits_where_blocks_and_rounds_begin(baseline, ranks, interleave):
    """Token by token over the lengths at which a rank's share changes its form: what is off by a key shows here."""
    text = [*PROMPT, *baseline]
    runner = make_runner(small(), ranks=ranks, block_size=BLOCK, table_width=20, interleave=interleave)
    right, _ = oracle(small())(text)
    near = {length + more for length in CROSSED for more in (-1, 0, 1)}
    position = 0
    while position < len(text):
        ahead = 1 if position in near else min((n for n in near if n > position), default=len(text)) - position
        tokens = text[position : position + ahead]
        piece = Piece(tokens=tokens, start=position, table=range(20))
        (found,), _ = runner.forward([[piece]], [range(ahead)], filling=False)
        torch.testing.assert_close(found, right[position : position + ahead], rtol=1e-5, atol=MARGIN / 50)
        position += ahead


@pytest.mark.parametrize(
    ("choice", "count"),
    [
        *(pytest.param(one, FIRST, id=label(one)) for one in RUNS[:SAMPLE]),
        *(pytest.param(one, COUNT, marks=pytest.mark.soak, id=f"{label(one)}-all") for one in RUNS),
    ],
)
def test_the_same_tokens(baseline, choice, count):
    tokens, together = serve(**choice, count=count)
    assert tokens == baseline[:count]
    assert {1, 3} <= set(together) if choice["company"] else set(together) <= {0, 1}


@pytest.mark.soak
@pytest.mark.parametrize("rest", [dict(zip(ALL, v, strict=True)) for v in itertools.product(*ALL.values())], ids=str)
def test_the_same_tokens_in_all_combinations(baseline, rest):
    assert serve(**rest)[0] == baseline


@pytest.mark.parametrize("name", [name for name in orchestrations.NAMED if name not in ANYWHERE])
def test_the_same_tokens_under_orchestrations_of_whole_layers(baseline, name):
    """Chunks of prompts, single tokens and drafts, each in two micro-batches where the orchestration wants two."""
    chosen = orchestrations.NAMED[name]
    runner = make_runner(
        small(), ranks=2, requests=2, block_size=BLOCK, orchestration=chosen, prefill_orchestration=chosen, mtp=True
    )
    engine = Engine(runner=runner, chunk=11, drafter=MtpDrafter(runner, 2))
    other = random_prompts(1)[0]
    assert finish(engine, [PROMPT, other], 8) == [baseline[:8], oracle(small()).greedy(other, 8)]
    assert {key[-1] for key in runner.programs} == {False, True}  # those that fill in a prompt, and the others


@pytest.mark.parametrize("seed", mostly_soak(range(3), [0]))
def test_the_same_tokens_on_the_hostile_machine(baseline, seed):
    """Streams late and interleaved at random, memory poisoned: prompt, decoding and drafts."""
    runner = make_runner(small(), ranks=2, requests=2, block_size=BLOCK, adversary=seed, mtp=True)
    engine = Engine(runner=runner, chunk=12, drafter=MtpDrafter(runner, 2))
    other = random_prompts(1)[0]
    assert finish(engine, [PROMPT, other], 8) == [baseline[:8], oracle(small()).greedy(other, 8)]


def test_a_sample_has_every_value():
    """Of the runs among which every two meet, at most 18."""
    assert 12 <= len(RUNS) <= 18
    assert all({choice[axis] for choice in RUNS[:SAMPLE]} == set(values) for axis, values in AXES.items())
