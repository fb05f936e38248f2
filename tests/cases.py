"""Which cases a test has, and which of them are for long runs only.

Small cases share a test, which costs more than what most of them show.  Of a
product of parameters a plain run takes those among which every two values meet.
"""

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest


def each(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, in one test, whose failure names the case; stacked, every one with every other.

    Each case gets random generators as they were at the start, so that what it draws does not depend on the others.
    """
    names = (names,) if isinstance(names, str) else names
    choices = [dict(zip(names, case if len(names) > 1 else (case,), strict=True)) for case in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            for choice in choices:
                try:
                    test(**{name: _fresh(value) for name, value in given.items()}, **choice)
                except BaseException as error:
                    assert not isinstance(error, pytest.skip.Exception), f"would skip what follows {choice}"
                    error.add_note("with " + ", ".join(f"{name}={_named(value)}" for name, value in choice.items()))
                    raise

        signature = inspect.signature(test)
        free = [parameter for name, parameter in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=free)  # type: ignore[attr-defined]
        return run

    return decorate


def _fresh(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, np.random.Generator) else value


def _named(value: Any) -> str:
    return str(getattr(value, "__name__", None) or repr(value))


def pairwise(**axes: Sequence[Any]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Names and a few cases, among which every two values of two axes meet, as `each` and `parametrize` take them.

    The next case is one that has the most new pairs, so the first of them have the most.
    """
    everything = [*itertools.product(*map(range, map(len, axes.values())))]
    left = {pair for choice in everything for pair in _pairs(choice)}
    chosen = []
    while left:
        best = max(everything, key=lambda choice: len(left & _pairs(choice)))
        chosen.append(tuple(values[k] for values, k in zip(axes.values(), best, strict=True)))
        left -= _pairs(best)
    return tuple(axes), chosen


def _pairs(choice: Sequence[int]) -> set[Any]:
    return set(itertools.combinations(enumerate(choice), 2))


def mostly_soak(cases: Iterable[Any], always: Iterable[Any]) -> list[Any]:
    """All cases as parameters: those of `always` in every run, the rest in long ones."""
    kept = list(always)
    cases = [*cases]
    assert all(case in cases for case in kept)
    return [case if case in kept else _long(case) for case in cases]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)
