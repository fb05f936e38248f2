"""Parameters that mean nothing are refused when the op is made, naming field, rule and value."""

import math
from typing import Any

import pytest
from attrs import field, frozen

from mla_fx.effects import Group, InputError
from mla_fx.effects.validate import boolean, instance, integer, number, one_of, word


def made(validator: Any, value: Any) -> Any:
    @frozen
    class Holder:
        it: Any = field(validator=validator)

    return Holder(value).it


@pytest.mark.parametrize(
    ("validator", "value"),
    [
        (integer(0), 0),
        (integer(2, even=True), 4),
        (number(), -1.5),
        (number(least=0), 0),
        (number(above=0), 1e-9),
        (one_of("a", "b"), "b"),
        (instance(Group), Group("tp", 2)),
        (boolean, False),
        (word, "layer_3"),
    ],
)
def test_what_fits_is_taken_as_it_is(validator, value):
    assert made(validator, value) is value


@pytest.mark.parametrize(
    ("validator", "value", "rule"),
    [
        (integer(1), 0, "must be an integer of at least 1: got 0"),
        (integer(1), 2.0, "must be an integer of at least 1: got 2.0"),
        (integer(0), True, "must be an integer of at least 0: got True"),
        (integer(0), "3", "must be an integer of at least 0: got '3'"),
        (integer(0, even=True), 3, "must be even, for pairs to rotate: got 3"),
        (number(), math.nan, "must be a finite number: got nan"),
        (number(), False, "must be a finite number: got False"),
        (number(least=0), -1, "must be a number of at least 0: got -1"),
        (number(above=0), 0.0, "must be a number above 0: got 0.0"),
        (number(above=0), math.inf, "must be a number above 0: got inf"),
        (one_of("a", "b"), "c", "must be one of a, b: got 'c'"),
        (instance(Group), 8, "must be a Group: got 8"),
        (boolean, 1, "must be True or False: got 1"),
        (word, "", "must be a word of letters, digits and underscores: got ''"),
        (word, 3, "must be a word of letters, digits and underscores: got 3"),
    ],
)
def test_what_does_not_is_refused(validator, value, rule):
    with pytest.raises(InputError) as caught:
        made(validator, value)
    assert str(caught.value) == f"it: {rule}"
