"""Parameters that mean nothing are refused when an op is made, by the name of the field.

What an op with parameters is made of, and what means nothing for each, says its
own test, as `SENSE` and `NONSENSE`; a group is refused alike everywhere.
"""

import importlib

import attrs
import pytest

from mla_fx.effects import Group, InputError, ops
from mla_fx.effects.op import stem

GROUP = Group("tp", 2)
NO_GROUPS = (2, "tp", None, ("tp", 2), Group)


def told(op):
    """What the op's test says: sensible parameters, and those that are not, field by field."""
    test = importlib.import_module(f"tests.ops.test_{stem(op)}")
    names = [field.name for field in attrs.fields(op)]
    sense, nonsense = getattr(test, "SENSE", {}), getattr(test, "NONSENSE", {})
    if "group" in names:
        optional = attrs.fields(op).group.default is None
        refused = [group for group in NO_GROUPS if not (group is None and optional)]
        sense, nonsense = {**sense, "group": GROUP}, {**nonsense, "group": refused}
    return names, sense, nonsense


@pytest.mark.parametrize("op", ops.ALL, ids=stem)
def test_every_field_has_its_row(op):
    names, sense, nonsense = told(op)
    assert set(sense) == set(names) == set(nonsense)
    assert all(nonsense.values())
    made = op(**sense)
    assert {name: getattr(made, name) for name in names} == sense


ROWS = [(op, name, value) for op in ops.ALL for name, values in told(op)[2].items() for value in values]


@pytest.mark.parametrize(("op", "name", "value"), ROWS, ids=[f"{stem(op)}-{name}-{v!r}" for op, name, v in ROWS])
def test_nonsense_is_refused(op, name, value):
    with pytest.raises(InputError, match=rf"^{name}: must be .*: got "):
        op(**{**told(op)[1], name: value})


@pytest.mark.parametrize("op", ops.ALL, ids=stem)
def test_a_parameter_that_there_is_not_is_refused(op):
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        op(**told(op)[1], nothing=1)
