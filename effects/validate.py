"""Validators of attrs fields: a value that means nothing is refused where it is made, naming field, rule and value."""

import math
from collections.abc import Callable
from typing import Any

from attrs import Attribute


class InputError(ValueError):
    """A value that an input may not have: names the field, what it must be, and what it was."""


Validator = Callable[[Any, "Attribute[Any]", Any], None]


def integer(least: int, *, even: bool = False) -> Validator:
    """An integer of at least `least`; True is none."""

    def check(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{attribute.name}: must be an integer of at least {least}: got {value!r}")
        if even and value % 2:
            raise InputError(f"{attribute.name}: must be even, for pairs to rotate: got {value}")

    return check


def number(*, least: float | None = None, above: float | None = None) -> Validator:
    """A finite number of at least `least`, or above `above`, or any."""

    def check(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
        what = "a finite number" if least is above is None else "a number of at least " + str(least)
        what = what if above is None else f"a number above {above}"
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or (least is not None and value < least) or (above is not None and value <= above):
            raise InputError(f"{attribute.name}: must be {what}: got {value!r}")

    return check


def one_of(*known: Any) -> Validator:
    """One of a few values."""

    def check(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
        if value not in known:
            raise InputError(f"{attribute.name}: must be one of {', '.join(map(str, known))}: got {value!r}")

    return check


def instance(kind: type) -> Validator:
    """A value of this class."""

    def check(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
        if not isinstance(value, kind):
            raise InputError(f"{attribute.name}: must be a {kind.__name__}: got {value!r}")

    return check


def boolean(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{attribute.name}: must be True or False: got {value!r}")


def word(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    """A name: letters, digits and underscores."""
    if not isinstance(value, str) or not value.isidentifier():
        raise InputError(f"{attribute.name}: must be a word of letters, digits and underscores: got {value!r}")


#: Up to so many numbers Python looks at faster than a reduction of NumPy starts.
_FEW = 64


def within(numbers: Any, low: int, high: int) -> bool:
    """Whether all numbers of a NumPy array are in `low`..`high` - 1."""
    if numbers.size > _FEW:
        return bool(low <= numbers.min() and numbers.max() < high)
    few = numbers.ravel().tolist()
    return not few or (low <= min(few) and max(few) < high)
