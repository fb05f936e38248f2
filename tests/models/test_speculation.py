"""Drafts, whatever they are, change how many steps a text takes and nothing of what it says."""

import random

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_fx import StepShape
from mla_fx.effects import InputError
from mla_fx.models import Engine
from tests.models.served import Paged, finish, make_runner, oracle, random_prompts, run, small

#: What an adversary may propose behind a text.
KINDS = ["right", "right then wrong", "wrong", "random", "none", "too many", "repeat", "end"]


@define
class Adversary:
    """Proposes by kinds dealt at random, and notes for every request what it proposed behind which text."""

    right: object  # tokens that follow a text: (tokens, count) -> list
    count: int
    kinds: list[str]
    vocabulary: int = 11
    end: tuple[int, ...] = ()
    dice: random.Random = field(factory=lambda: random.Random(0))
    proposed: list[tuple[object, int, list[int]]] = field(factory=list)  # request, length of its text, drafts

    def propose(self, served, hidden):
        drafts = [self._drafts(one.request, self.dice.choice(self.kinds)) for one in served]
        for one, mine in zip(served, drafts, strict=True):
            self.proposed.append((one.request, len(one.request.tokens), list(mine)))
        return drafts

    def _drafts(self, request, kind):
        right = self.right(request.tokens, self.count + 3)
        wrong = [(token + 1) % self.vocabulary for token in right]
        cut = self.dice.randint(0, self.count)
        return {
            "right": right[: self.count],
            "right then wrong": [*right[:cut], *wrong[cut : self.count]],
            "wrong": wrong[:cut],
            "random": self.dice.choices(range(self.vocabulary), k=cut),
            "none": [],
            "too many": right,
            "repeat": request.tokens[-1:] * self.count,
            "end": list(self.end[:1] or right) + right[:2],
        }[kind]


def paged(*, requests=1, blocks=200, block_size=2, ranks=1, table_width=200):
    return Paged(
        StepShape(
            ranks=ranks, requests=requests, blocks=blocks, block_size=block_size, table_width=table_width, dtype="fp32"
        )
    )


# --- any drafts -------------------------------------------------------------


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 10), min_size=1, max_size=9), st.integers(1, 14)), min_size=1, max_size=5
    ),
    requests=st.integers(1, 4),
    ranks=st.integers(1, 3),
    block_size=st.integers(1, 3),
    spare=st.sampled_from([0, 1, 3, 200]),
    more=st.sampled_from([0, 1, 4, 30]),
    count=st.integers(1, 4),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    end=st.sampled_from([(), (0,), (2, 7)]),
    seed=st.integers(0, 1000),
)
def test_any_drafts(prompts, requests, ranks, block_size, spare, more, count, kinds, end, seed):
    """Several requests, several ranks, chunks and blocks that suffice or hardly do."""
    longest = max(-(-(len(p) + new - 1) // (ranks * block_size)) for p, new in prompts)
    runner = paged(requests=requests, ranks=ranks, block_size=block_size, blocks=longest + spare, table_width=longest)
    drafter = Adversary(runner.greedy, count, kinds, end=end, dice=random.Random(seed))
    engine = Engine(runner=runner, chunk=requests + more, drafter=drafter, end=end)
    added = [engine.add(prompt, max_new_tokens=new) for prompt, new in prompts]
    told = {request.number: [] for request in added}
    for output in run(engine):
        told[output.request.number] += output.tokens
        assert len(runner.steps) < 600
    for request, (prompt, new) in zip(added, prompts, strict=True):
        text = runner.greedy(prompt, new, end)
        assert told[request.number] == request.new_tokens == text
        assert 0 <= request.accepted <= request.drafted
        assert request.accepted < len(text)
    assert engine.replicas[0].blocks.available == longest + spare
    if spare == 200 and more == 30:
        check_acceptance(drafter, runner, added, end)
    assert all(sum(len(piece.tokens) for piece in step) <= requests + more for step in runner.steps)


def check_acceptance(drafter, runner, requests, end):
    """With room for all drafts: verified are those that could become tokens, accepted those that did."""
    for request in requests:
        text = [*request.prompt, *runner.greedy(request.prompt, request.max_new_tokens, end)]
        drafted = accepted = 0
        for asked, length, drafts in drafter.proposed:
            if asked is not request or length == len(request.prompt):
                continue
            most = min(drafter.count, len(request.prompt) + request.max_new_tokens - length - 1)
            usable = drafts[:most]
            ends = [i for i, token in enumerate(usable) if token in end]
            usable = usable[: ends[0] + 1] if ends else usable
            drafted += len(usable)
            accepted += next(
                (i for i, token in enumerate(usable) if length + i >= len(text) or text[length + i] != token),
                len(usable),
            )
        assert (request.drafted, request.accepted) == (drafted, accepted)


@pytest.mark.parametrize("blocks", [200, 11])
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_drafts_on_a_model(ranks, blocks):
    """Attention over caches in which rejected drafts have left their keys."""
    directory, prompts = small(), random_prompts(4, seed=6)
    right = [oracle(directory).greedy(prompt, 24) for prompt in prompts]
    texts = [[*prompt, *text, *[0] * 9] for prompt, text in zip(prompts, right, strict=True)]

    def follow(tokens, count):
        (text,) = (text for text in texts if text[: len(tokens)] == tokens)
        return text[len(tokens) : len(tokens) + count]

    runner = make_runner(directory, ranks=ranks, requests=3, blocks=blocks, block_size=4)
    drafter = Adversary(follow, 3, KINDS, vocabulary=64)
    engine = Engine(runner=runner, chunk=12, drafter=drafter)
    assert finish(engine, prompts, 24) == right
    assert sum(request.accepted for request in {one for one, *_ in drafter.proposed}) > 10


# --- how many steps ---------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 2, 12, 60, 61])
def test_right_drafts_save_steps(count, length):
    """The first token comes with the prompt, then `count` + 1 tokens a step; all drafts are accepted."""
    runner = paged()
    engine = Engine(runner=runner, drafter=Adversary(runner.greedy, count, ["right"]))
    (text,) = finish(engine, [[1, 2, 3]], length)
    assert text == runner.greedy([1, 2, 3], length)
    assert len(runner.steps) == 1 + -(-(length - 1) // (count + 1))


def test_accepted_drafts_behind_the_end_do_not_count():
    runner = paged()
    texts = [([token], runner.greedy([token], 8)) for token in range(11)]
    prompt, whole = next((prompt, text) for prompt, text in texts if text[3] not in text[:3])
    engine = Engine(runner=runner, drafter=Adversary(runner.greedy, 6, ["right"]), end=[whole[3]])
    request = engine.add(prompt, max_new_tokens=8)
    assert [output.tokens for output in run(engine)] == [tuple(whole[:1]), tuple(whole[1:4])]
    assert (request.drafted, request.accepted) == (3, 3)


# --- sharing a step and its blocks --------------------------------------------


@pytest.mark.parametrize("chunk", [3, 4, 5])
def test_drafts_keep_nobody_waiting(chunk):
    """However small the chunk: every text goes on at every step, and so does the prompt behind them."""
    runner = paged(requests=3)
    engine = Engine(runner=runner, chunk=chunk, drafter=Adversary(runner.greedy, 4, ["wrong", "right"]))
    for token in (1, 2):
        engine.add([token], max_new_tokens=30)
    engine.step()
    prompt = engine.add(list(range(9)), max_new_tokens=3)
    while prompt.first_token is None:
        cached = prompt.cached
        assert {0, 1} <= {output.request.number for output in engine.step()}
        assert prompt.cached > cached
    assert len(runner.steps) <= 10


def test_drafts_preempt_nobody():
    """By hand: one block of four positions each, and no third; drafts are cut to what the block holds."""
    runner = paged(requests=2, blocks=2, block_size=4)
    engine = Engine(runner=runner, drafter=Adversary(runner.greedy, 3, ["right then wrong"]))
    requests = [engine.add([1, 2], max_new_tokens=5), engine.add([3], max_new_tokens=3)]
    for _ in run(engine):
        pass
    assert [r.new_tokens for r in requests] == [runner.greedy([1, 2], 5), runner.greedy([3], 3)]
    assert sum(piece.start == 0 for step in runner.steps for piece in step) == 2  # nobody started over
    assert sum(request.drafted for request in requests) > 0


# --- what is refused --------------------------------------------------------


@define
class Fixed:
    """Proposes the same at every step."""

    drafts: list
    count: int = 3

    def propose(self, served, hidden):
        return self.drafts


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ([[1, 11]], r"drafts: each must be in 0\.\.10: got 11"),
        ([[-1]], r"drafts: each must be in 0\.\.10: got -1"),
        ([[1.5]], r"drafts: each must be in 0\.\.10: got 1\.5"),
        ([], r"drafts: must have a list for each of 1 requests: got 0"),
        ([[1], [2]], r"drafts: must have a list for each of 1 requests: got 2"),
    ],
)
def test_drafts_that_are_refused(drafts, message):
    """The tokens of the step are kept, and with another drafter it goes on."""
    runner = paged()
    engine = Engine(runner=runner, drafter=Fixed(drafts))
    request = engine.add([1, 2], max_new_tokens=6)
    with pytest.raises(InputError, match=f"^{message}$"):
        engine.step()
    engine.drafter = None
    for _ in run(engine):
        pass
    assert request.new_tokens == runner.greedy([1, 2], 6)
