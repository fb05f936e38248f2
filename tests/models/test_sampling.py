"""From logits to a token: filters and penalties against transformers, draws against the distribution."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as independent

from mla_fx.effects import InputError
from mla_fx.models import Sampling
from mla_fx.models.sampling import FIELDS, Sampler, distribution, logprobs, noise
from tests.cases import mostly_soak

VOCABULARY = 40


def random_logits(seed, *, scale=3.0):
    return scale * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))


def by_transformers(logits, sampling):
    """Probabilities by the processors of the other library, in the order in which it runs them."""
    chain = [independent.TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k:
        chain.append(independent.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(independent.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(independent.MinPLogitsWarper(sampling.min_p))
    scores = logits.double()[None]
    for processor in chain:
        scores = processor(None, scores)
    return scores.softmax(1)[0]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.2, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 39, 40, 100]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_filters_are_those_of_transformers(seed, temperature, top_k, top_p, min_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = distribution(random_logits(seed), sampling)
    right = by_transformers(random_logits(seed), sampling)
    assert torch.equal(found > 0, right > 0)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=0)
    assert found.sum().item() == pytest.approx(1, abs=1e-12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    presence=st.sampled_from([-1.0, 0.0, 0.7]),
    shift=st.sampled_from([0.0, -10.0]),  # the likeliest tokens have positive logits, or all are negative
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
    text=st.lists(st.integers(0, VOCABULARY - 1), max_size=8),
)
def test_penalties(seed, repetition, presence, shift, prompt, text):
    """Repetition by transformers, presence by hand; token after token, as a text grows."""
    sampling = Sampling(repetition_penalty=repetition, presence_penalty=presence)
    sampler = Sampler(sampling, prompt=len(prompt))
    for end in range(len(text) + 1):
        logits, tokens = random_logits(seed + end) + shift, [*prompt, *text[:end]]
        right = logits.double()[None]
        if repetition != 1:
            right = independent.RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([tokens]), right.clone())
        for token in set(text[:end]):
            right[0, token] -= presence
        assert sampler.choose(logits, tokens) == int(right.argmax())


def chi_square(found, right):
    """Over the tokens that are expected at least five times, and all others together; and the degrees of freedom."""
    count = sum(found.values())
    often = [token for token, p in enumerate(right) if count * p >= 5]
    cells = [(found[token], count * right[token]) for token in often]
    rest = count - sum(expected for _, expected in cells)
    if rest > 1:
        cells.append((count - sum(seen for seen, _ in cells), rest))
    return sum((seen - expected) ** 2 / expected for seen, expected in cells), len(cells) - 1


def most(freedom):
    """What chi-square exceeds in one run of 10,000 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


DRAWN = [
    Sampling(temperature=0.5),
    Sampling(temperature=1.0),
    Sampling(temperature=2.0, top_k=9, top_p=0.9, min_p=0.02),
]


@pytest.mark.parametrize(
    ("sampling", "vary"),
    mostly_soak(itertools.product(DRAWN, ["seed", "position"]), zip(DRAWN, ["seed", "position", "seed"], strict=True)),
    ids=str,
)
def test_draws_follow_the_distribution(sampling, vary):
    logits, right = random_logits(1, scale=1.5), by_transformers(random_logits(1, scale=1.5), sampling).tolist()
    found = Counter()
    for draw in range(3000):
        seed, position = (draw, 7) if vary == "seed" else (7, draw + 1)
        sampler = Sampler(Sampling(**{name: getattr(sampling, name) for name in FIELDS} | {"seed": seed}), prompt=1)
        found[sampler.choose(logits, range(position))] += 1
    assert all(right[token] > 0 for token in found)
    value, freedom = chi_square(found, right)
    assert freedom > 3
    assert value < most(freedom)


def test_chi_square_sees_a_wrong_distribution():
    """Draws at one temperature against the probabilities at another."""
    logits = random_logits(1, scale=1.5)
    right = by_transformers(logits, Sampling(temperature=1.1)).tolist()
    found = Counter(Sampler(Sampling(temperature=1.0, seed=seed), prompt=1).choose(logits, [0]) for seed in range(3000))
    value, freedom = chi_square(found, right)
    assert value > most(freedom)


def test_noise_of_positions_and_seeds_has_nothing_in_common():
    """A generator by counter whose positions lay close together would repeat the noise of one, shifted, at the next."""
    draws = [noise(seed, position, 1000).tolist() for seed in (0, 1, 2**32, 2**64 - 1) for position in (0, 1, 2, 2**40)]
    assert len({value for draw in draws for value in draw}) == 1000 * len(draws)
    assert torch.equal(noise(3, 4, 1000), noise(3, 4, 1000))
    assert np.mean(draws) == pytest.approx(1, abs=0.05)


def test_a_low_temperature_is_greedy():
    """Down to numbers so small that the logits' quotient is infinite."""
    for temperature in (0, 1e-3, 1e-300, 5e-324):
        for seed in range(20):
            logits = random_logits(seed)
            chosen = Sampler(Sampling(temperature=temperature, seed=seed), prompt=1).choose(logits, [0])
            assert chosen == int(logits.argmax())


def test_logprobs():
    logits = random_logits(3)
    right = [math.log(p) for p in (logits.double().exp() / logits.double().exp().sum()).tolist()]
    found = logprobs(logits, 5, 3)
    assert found.chosen == pytest.approx(right[5])
    order = sorted(range(VOCABULARY), key=right.__getitem__, reverse=True)
    assert [token for token, _ in found.top] == order[:3]
    assert [value for _, value in found.top] == pytest.approx([right[token] for token in order[:3]])
    assert logprobs(logits, 5, 0).top == ()
    assert len(logprobs(logits, 5, 1000).top) == VOCABULARY


REFUSED = {
    "temperature": [-0.5, math.nan, math.inf, "x", None, True],
    "top_k": [-1, 1.5, "x"],
    "top_p": [0, 1.1, math.nan, "x"],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0, -1, math.inf, math.nan],
    "presence_penalty": [math.inf, math.nan, "x"],
    "seed": [-1, 2**64, 1.5, "x"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_values_that_are_refused(name, value):
    with pytest.raises(InputError, match=rf"^{name}: must be .*: got {value!r}$"):
        Sampling(**{name: value})


def test_numbers_of_other_libraries():
    sampling = Sampling(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**64 - 1))
    assert sampling == Sampling(temperature=0.5, top_k=3, seed=2**64 - 1)
    assert type(sampling.top_k) is int
    assert set(REFUSED) == set(FIELDS)
