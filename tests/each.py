"""Many small cases in one test: a test of its own costs more than what most of them show."""

import copy
import functools
import inspect
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
