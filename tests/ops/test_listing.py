"""`ops.listing`: every op in a line, from its own docstrings, which name all that it takes."""

import inspect

import pytest

from mla_fx.effects import ops
from mla_fx.effects.op import stem

HEAD, RULE, *LINES = ops.listing().splitlines()


def test_the_listing_is_a_table_of_all_ops():
    assert HEAD.count("|") == RULE.count("|") == 5
    assert [line.split("|")[1].strip(" `") for line in LINES] == [stem(op) for op in ops.ALL]


@pytest.mark.parametrize(("op", "line"), list(zip(ops.ALL, LINES, strict=True)), ids=list(map(stem, ops.ALL)))
def test_a_line_says_what_the_op_says(op, line):
    """All operands by name, and in the order of the op, what it gives, and the first sentence of its file."""
    _, _, takes, gives, what, _ = line.split("|")
    places = [takes.index(f"`{name}`") for name in op.operands]
    assert places == sorted(places)
    assert gives.strip() and "->" not in gives
    assert what.strip() == inspect.getmodule(op).__doc__.splitlines()[0]


def test_a_line():
    assert "| `linear` | `x` [T, D], `weight` [F, D] | [T, F] | Project features with a checkpoint weight. |" in LINES
