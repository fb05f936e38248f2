"""Every case of `each` runs, and one that fails is named; a few have all pairs; the rest is for long runs."""

import itertools

import numpy as np
import pytest

from tests.cases import each, mostly_soak, pairwise


def test_every_case_runs_with_every_other():
    seen = []

    @each(("a", "b"), [(1, 2), (3, 4)])
    @each("c", "xy")
    def body(given, a, b, c):
        seen.append((given, a, b, c))

    body(given=0)
    assert seen == [(0, 1, 2, "x"), (0, 1, 2, "y"), (0, 3, 4, "x"), (0, 3, 4, "y")]


@pytest.mark.parametrize("fails", [lambda: 1 / 0, lambda: pytest.fail("no")], ids=["an error", "a failure"])
def test_the_case_that_fails_is_named(fails):
    @each("a", [1, 2, 3])
    @each("sort", [max, min])
    def body(a, sort):
        if (a, sort) == (2, min):
            fails()

    with pytest.raises((ZeroDivisionError, pytest.fail.Exception)) as caught:
        body()
    assert caught.value.__notes__ == ["with sort=min", "with a=2"]


def test_every_case_draws_the_same():
    drawn = []

    @each("_", range(3))
    def body(rng, _):
        drawn.append(rng.random())

    body(rng=np.random.default_rng(1))
    assert drawn == [np.random.default_rng(1).random()] * 3


def test_a_skip_would_hide_what_follows():
    @each("a", [1, 2])
    def body(a):
        pytest.skip("no")

    with pytest.raises(AssertionError, match=r"would skip what follows \{'a': 1\}"):
        body()


@each("value", [2, 3])
def test_fixtures_are_those_of_the_test(tmp_path, value):
    """As pytest sees a test, its cases are no fixtures."""
    assert tmp_path.is_dir() and value > 1


def test_every_two_values_meet():
    """In nine cases at least, of three axes of three; of two axes, in all of them."""
    axes = {name: range(3) for name in "abc"}
    names, chosen = pairwise(**axes)
    assert names == ("a", "b", "c") and 9 <= len(chosen) <= 12
    for one, two in itertools.combinations(range(3), 2):
        assert {(case[one], case[two]) for case in chosen} == set(itertools.product(range(3), repeat=2))
    assert sorted(pairwise(a=[1, 1.5], b=[None])[1]) == [(1, None), (1.5, None)]


def test_the_rest_is_for_long_runs():
    found = mostly_soak([(1, 2), (3, 4)], [(3, 4)])
    assert found[1] == (3, 4) and found[0].values == (1, 2) and [mark.name for mark in found[0].marks] == ["soak"]
    with pytest.raises(AssertionError):
        mostly_soak([1, 2], [3])
