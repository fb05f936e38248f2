"""What each request asks for, beside whatever others ask for: sampling, stop strings, logprobs; and how they end."""

import math
import random
from collections import Counter

import pytest
import torch
from attrs import define, evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from mla_fx import StepShape
from mla_fx.effects import InputError
from mla_fx.models import Engine, MtpDrafter, Sampling
from mla_fx.models.addition import DIRECTORY
from mla_fx.models.sampling import distribution, noise
from tests.models.served import Paged, make_runner, oracle, random_prompts, run, small
from tests.models.test_sampling import chi_square, most

LETTERS = "abcdefghijk"


class Alphabet:
    """A tokenizer of eleven letters, of which one token is none."""

    special = frozenset({10})

    def decode(self, tokens):
        return "".join(LETTERS[token] for token in tokens if token != 10)


@define
class Guesses:
    """A drafter that knows no noise: each draft is the likeliest token behind the one before, or some other."""

    runner: Paged
    count: int = 2
    dice: random.Random | None = None

    def propose(self, served, hidden):
        drafts = []
        for one in served:
            text = list(one.request.tokens)
            for _ in range(self.count):
                best = self.runner.next_token(text)
                text.append(self.dice.randrange(11) if self.dice and self.dice.random() < 0.5 else best)
            drafts.append(text[len(one.request.tokens) :])
        return drafts


def paged(*, requests=2, blocks=200, block_size=2, ranks=1, table_width=200):
    shape = StepShape(
        ranks=ranks, requests=requests, blocks=blocks, block_size=block_size, table_width=table_width, dtype="fp32"
    )
    return Paged(shape)


def alone(runner, prompt, count, sampling, end=()):
    """Token after token by the definition: penalties by hand, the distribution, one draw with the position's noise."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and not (len(tokens) > len(prompt) and tokens[-1] in end):
        logits = runner.logits(tokens).double()
        for token in set(tokens):
            logits[token] *= sampling.repetition_penalty ** (-1 if logits[token] > 0 else 1)
        for token in set(tokens[len(prompt) :]):
            logits[token] -= sampling.presence_penalty
        likely = distribution(logits, sampling)
        tokens.append(int((likely / noise(sampling.seed, len(tokens), 11)).argmax()))
    return tokens[len(prompt) :]


# --- steps ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "chunk", "steps"),
    [
        ([300], 512, [[256], [44]]),
        ([385], 512, [[385]]),  # a quarter of 512 is 128, and 127 are padding
        ([150, 150], 512, [[150, 106], [44]]),
        ([64] * 8, 512, [[64] * 8]),
        ([600], 1024, [[512], [88]]),
        ([1500], 1024, [[1024], [476]]),
        ([100, 20], 512, [[100, 20]]),  # a step that is as small as any is not parted
        ([2] * 9 + [300], 512, [[2] * 9 + [238], [62]]),
    ],
)
def test_no_more_than_a_quarter_of_a_large_step_is_padding(monkeypatch, prompts, chunk, steps):
    """Tokens of each prompt in each step, by hand."""
    runner, seen, forward = paged(requests=10, blocks=2000, table_width=1000), [], Paged.forward
    monkeypatch.setattr(
        Paged,
        "forward",
        lambda self, pieces, *rest, **named: (
            seen.append([len(piece.tokens) for piece in pieces[0]]) or forward(self, pieces, *rest, **named)
        ),
    )
    engine = Engine(runner=runner, chunk=chunk, prefix_cache=False)
    for length in prompts:
        engine.add([8] * length, max_new_tokens=1)
    list(run(engine))
    assert seen == steps


# --- sampling ---------------------------------------------------------------

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 4]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    asked=st.lists(
        st.tuples(st.lists(st.integers(0, 10), min_size=1, max_size=8), st.integers(1, 12), SAMPLINGS),
        min_size=1,
        max_size=5,
    ),
    requests=st.integers(1, 3),
    ranks=st.integers(1, 2),
    spare=st.sampled_from([0, 2, 100]),
    more=st.sampled_from([0, 3, 30]),
    drafts=st.integers(0, 3),
    end=st.sampled_from([(), (2, 7)]),
    seed=st.integers(0, 100),
)
def test_each_samples_as_it_would_alone(asked, requests, ranks, spare, more, drafts, end, seed):
    """Whatever is served beside it, in whatever chunks, with any drafts, started over or not."""
    longest = max(-(-(len(prompt) + count - 1) // (2 * ranks)) for prompt, count, _ in asked)
    runner = paged(requests=requests, ranks=ranks, blocks=longest + spare, table_width=longest)
    drafter = Guesses(runner, drafts, random.Random(seed)) if drafts else None
    engine = Engine(runner=runner, chunk=requests + more, drafter=drafter, end=end)
    added = [engine.add(prompt, max_new_tokens=count, sampling=sampling) for prompt, count, sampling in asked]
    list(run(engine))
    for request, (prompt, count, sampling) in zip(added, asked, strict=True):
        assert request.new_tokens == alone(runner, prompt, count, sampling, end)


@pytest.mark.parametrize("drafts", [0, 2])
def test_texts_follow_the_distribution(drafts):
    """The first and second token of many texts; with drafts the second is verified, and accepted as often as drawn.

    That is rejection sampling: a draft that is certain is accepted with its own probability.
    """
    runner, count = paged(requests=100, blocks=400), 1200
    engine = Engine(runner=runner, chunk=400, drafter=Guesses(runner, drafts) if drafts else None, prefix_cache=False)
    warm = [Sampling(temperature=0.8, top_k=9, seed=seed) for seed in range(count)]
    added = [engine.add([8], max_new_tokens=3, sampling=sampling) for sampling in warm]
    list(run(engine))
    first = distribution(runner.logits([8]), warm[0]).tolist()
    behind = [distribution(runner.logits([8, token]), warm[0]).tolist() for token in range(11)]
    second = [sum(p * row[token] for p, row in zip(first, behind, strict=True)) for token in range(11)]
    for place, right in enumerate((first, second)):
        value, freedom = chi_square(Counter(request.new_tokens[place] for request in added), right)
        assert freedom > 5
        assert value < most(freedom)
    if drafts:
        right = sum(p * max(row) for p, row in zip(first, behind, strict=True))  # the draft is the likeliest token
        found = sum(request.accepted >= 1 for request in added) / count
        assert abs(found - right) < 4 * math.sqrt(right * (1 - right) / count)


@define
class Knowing(Guesses):
    """A drafter that has the model's own logits and draws with the noise of each place."""

    def propose(self, served, hidden):
        drafts = []
        for one in served:
            text = list(one.request.tokens)
            for ahead in range(self.count):
                text.append(one.request.sampler.draft(self.runner.logits(text), one.request.tokens, ahead))
            drafts.append(text[len(one.request.tokens) :])
        return drafts


def test_drafts_that_are_drawn_with_the_same_noise():
    """From the model's own distribution: all are accepted, where the likeliest tokens are in a third of the cases."""
    shares = []
    for drafter in (Knowing, Guesses):
        runner = paged(requests=4)
        engine = Engine(runner=runner, drafter=drafter(runner, 2))
        warm = [Sampling(temperature=1.5, seed=seed) for seed in range(8)]
        added = [engine.add([3, seed], max_new_tokens=13, sampling=warm[seed]) for seed in range(8)]
        list(run(engine))
        assert [r.new_tokens for r in added] == [alone(runner, [3, seed], 13, warm[seed]) for seed in range(8)]
        shares.append(sum(r.accepted for r in added) / sum(r.drafted for r in added))
    assert shares[0] == 1
    assert shares[1] < 0.6


def test_drafts_of_the_prediction_module_at_a_temperature():
    """A real model and its module: texts are those without drafts, and some drafts are accepted."""
    texts = []
    for drafts in (0, 2):
        runner = make_runner(DIRECTORY, mtp=drafts > 0)
        engine = Engine(runner=runner, drafter=MtpDrafter(runner, drafts) if drafts else None)
        added = [
            engine.add([1, 4, 5, seed], max_new_tokens=16, sampling=Sampling(temperature=1.5, top_k=20, seed=seed))
            for seed in (6, 7, 8)
        ]
        list(run(engine))
        texts.append([request.new_tokens for request in added])
    assert texts[0] == texts[1]
    assert 0 < sum(request.accepted for request in added) < sum(request.drafted for request in added)


# --- logprobs ---------------------------------------------------------------


class Fetched(TorchFunctionMode):
    """Counts what is brought to the host in here."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.Tensor.cpu
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("top_logprobs", [None, 2])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=3), Sampling(presence_penalty=2.0)])
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_row_comes_to_the_host_once(drafts, sampling, top_logprobs):
    """For whatever a request wants of it, and not at all where it wants its likeliest token alone."""
    runner = paged()
    engine = Engine(runner=runner, drafter=Guesses(runner, drafts) if drafts else None)
    request = engine.add([1, 2, 3], max_new_tokens=7, sampling=sampling, top_logprobs=top_logprobs)
    with Fetched() as fetched:
        for _ in run(engine):
            pass
    assert len(request.new_tokens) == 7
    assert fetched.count == (0 if sampling == Sampling() and top_logprobs is None else 7)


@pytest.mark.parametrize("drafts", [0, 3])
def test_logprobs_of_every_token(drafts):
    runner = paged()
    engine = Engine(runner=runner, drafter=Guesses(runner, drafts, random.Random(0)) if drafts else None)
    asked = engine.add([3, 1], max_new_tokens=9, sampling=Sampling(temperature=1.0), top_logprobs=2)
    other = engine.add([3, 1], max_new_tokens=9)
    told = [logs for output in run(engine) if output.request is asked for logs in output.logprobs]
    assert told == asked.logprobs and len(told) == 9 and other.logprobs == []
    for place, logs in enumerate(told):
        right = runner.logits(asked.tokens[: 2 + place]).double().log_softmax(0)
        assert logs.chosen == pytest.approx(float(right[asked.new_tokens[place]]))
        assert [token for token, _ in logs.top] == right.topk(2).indices.tolist()


# --- stop strings -----------------------------------------------------------


def stopped_at(tokens, stops):
    """Tokens up to the one with which a stop string is there, and the text before it."""
    for end in range(1, len(tokens) + 1):
        text = Alphabet().decode(tokens[:end])
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return tokens[:end], text[: min(found)]
    return tokens, Alphabet().decode(tokens)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    prompt=st.lists(st.integers(0, 10), min_size=1, max_size=5),
    places=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=3),
    strays=st.lists(st.text("abcdefghij", min_size=1, max_size=3), max_size=2),
    drafts=st.integers(0, 3),
    end=st.sampled_from([(), (2, 7)]),
)
def test_stop_strings(prompt, places, strays, drafts, end):
    """Strings that occur in the text, within a token or across several, and some that perhaps do not."""
    runner = paged()
    whole = runner.greedy(prompt, 14, end)
    letters = Alphabet().decode(whole)
    stops = [letters[start : start + size] for start, size in places if start < len(letters)] + strays
    engine = Engine(
        runner=runner,
        tokenizer=Alphabet(),
        end=end,
        drafter=Guesses(runner, drafts, random.Random(1)) if drafts else None,
    )
    request, other = engine.add(prompt, max_new_tokens=14, stop=stops), engine.add(prompt, max_new_tokens=14)
    outputs = [output for output in run(engine) if output.request is request]
    tokens, text = stopped_at(whole, stops)
    assert request.new_tokens == tokens
    assert "".join(output.text for output in outputs) == request.text == text
    assert request.finish_reason == ("length" if len(tokens) == 14 and request.stream.stopped is None and
                                     tokens[-1] not in end else "stop")  # fmt: skip
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert other.new_tokens == whole and other.text == letters


# --- logits that are no numbers ----------------------------------------------


@define(eq=False)
class Broken(Paged):
    """Logits are not finite behind texts that end with a certain token."""

    behind: int = 5
    value: float = math.nan

    def logits(self, text):
        logits = super().logits(text)
        if text[-1] == self.behind:
            logits[3] = self.value
        return logits


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, seed=5), Sampling(presence_penalty=0.1)], ids=str
)
@pytest.mark.parametrize("drafts", [0, 3])
def test_logits_that_are_not_finite_end_one_request(drafts, sampling, value):
    """It keeps what it said before; the others say what they would say; its blocks are free."""
    runner = Broken(paged(requests=4).shape, value=value)
    whole = paged()
    prompts = [[token, 1] for token in range(9)]
    engine = Engine(
        runner=runner, tokenizer=Alphabet(), drafter=Guesses(whole, drafts, random.Random(2)) if drafts else None
    )
    added = [engine.add(prompt, max_new_tokens=9, sampling=sampling) for prompt in prompts]
    told = {request: [] for request in added}
    for output in run(engine):
        told[output.request] += output.tokens
        assert output.finished == (output.request.finish_reason is not None)
    reasons = Counter()
    for request, prompt in zip(added, prompts, strict=True):
        text = alone(whole, prompt, 9, sampling)
        bad = text.index(5) + 1 if 5 in text[:-1] else None
        assert told[request] == request.new_tokens == text[:bad]
        assert request.text == Alphabet().decode(text[:bad])
        assert request.finish_reason == ("length" if bad is None else "error")
        error = None if bad is None else f"logits: must be finite, and are not behind {2 + bad} tokens"
        assert request.error == error
        reasons[request.finish_reason] += 1
    assert min(reasons.values()) >= 2 and len(reasons) == 2
    assert engine.replicas[0].blocks.available == 200


@pytest.mark.parametrize("mtp", [False, True])
def test_a_model_that_overflows_ends_one_request(mtp):
    """In a step that all share: one token's embedding is infinite, and only who has that token is told."""
    directory, prompts = small(), random_prompts(3, seed=2)
    runner = make_runner(directory, ranks=2, requests=3, mtp=mtp)
    texts = [oracle(directory).greedy(prompt, 8) for prompt in prompts]
    bad = next(iter(set(range(64)) - {token for text in [*prompts, *texts] for token in text}))
    tables = runner.params.leaves["params.embed_tokens"]
    rank, row = divmod(bad, tables[0].shape[0])
    tables[rank][row] = math.inf
    engine = Engine(runner=runner, chunk=6, drafter=MtpDrafter(runner, 2) if mtp else None)
    good = [engine.add(prompt, max_new_tokens=8) for prompt in prompts]
    broken = engine.add([1, bad, 2], max_new_tokens=8)
    list(run(engine))
    assert [request.new_tokens for request in good] == texts
    assert broken.finish_reason == "error" and broken.new_tokens == []
    assert "behind 3 tokens" in broken.error


# --- ends -------------------------------------------------------------------


def test_nothing_is_given_of_a_request_that_was_aborted_in_the_same_step():
    engine = Engine(runner=paged(requests=3))
    first, second, third = (engine.add([token], max_new_tokens=4) for token in (1, 2, 3))
    told = Counter()
    for output in engine.run():
        told[output.request.number] += 1
        if output.request is first and told[0] == 2:
            engine.abort(second)
    assert told == {0: 4, 1: 1, 2: 4}
    assert [r.finish_reason for r in (first, second, third)] == ["length", "abort", "length"]
    assert len(second.new_tokens) == 2  # what it generated stays with it


def test_a_waiting_request_that_is_aborted():
    engine = Engine(runner=paged(requests=1))
    first, second = (engine.add([token], max_new_tokens=2) for token in (1, 2))
    engine.step()
    engine.abort(second)
    list(run(engine))
    assert (first.finish_reason, second.finish_reason, second.new_tokens) == ("length", "abort", [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": 0.7}, r"sampling: must be a Sampling: got 0\.7"),
        ({"top_logprobs": -1}, r"top_logprobs: must be an integer of at least 0: got -1"),
        ({"top_logprobs": "x"}, r"top_logprobs: must be an integer of at least 0: got 'x'"),
        ({"stop": "end"}, r"stop: must be a sequence of texts that are not empty: got 'end'"),
        ({"stop": ["a", ""]}, r"stop: must be a sequence of texts that are not empty: got \['a', ''\]"),
        ({"stop": [3]}, r"stop: must be a sequence of texts that are not empty: got \[3\]"),
    ],
)
def test_what_is_refused(options, message):
    engine = Engine(runner=paged(), tokenizer=Alphabet())
    with pytest.raises(InputError, match=f"^{message}$"):
        engine.add([1], max_new_tokens=2, **options)
    assert not engine.busy


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(InputError, match=r"^stop: must be empty where the engine has no tokenizer: got \('x',\)$"):
        Engine(runner=paged()).add([1], max_new_tokens=2, stop=("x",))


def test_settings_are_values():
    assert evolve(Sampling(seed=3), temperature=0.5) == Sampling(temperature=0.5, seed=3)
    assert torch.equal(distribution(torch.tensor([1.0, 3.0, 2.0]), Sampling()), torch.tensor([0.0, 1, 0]).double())
