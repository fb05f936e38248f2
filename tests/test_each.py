"""`each`: every case runs, one that fails is named, and none depends on those before it."""

import numpy as np
import pytest

from tests.each import each


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
