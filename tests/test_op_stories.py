"""One op, one stem: descriptor, a rule in each backend, a test; `git ls-files '*combine*'` is the index of combine."""

import importlib
import inspect
from pathlib import Path

import attrs
import pytest

from mla_fx.backends import ascend, cpu, cuda, reference
from mla_fx.effects import ops
from mla_fx.effects.op import stem

BACKENDS = {"reference": reference, "cpu": cpu, "ascend": ascend, "cuda": cuda}
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
ROOT = Path(__file__).parents[1]
FOLDERS = ("effects/ops", *(f"backends/{name}" for name in BACKENDS))
PLACES = (*(f"{folder}/{{}}.py" for folder in FOLDERS), "tests/ops/test_{}.py")
each_op = pytest.mark.parametrize("op", ops.ALL, ids=stem)


@each_op
@pytest.mark.parametrize("place", PLACES)
def test_story_is_whole(op, place):
    assert (ROOT / place.format(stem(op))).is_file()


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_is_without_an_op(folder):
    """An op that has a file stands in `ops.ALL`, once; a rule that has a file is the rule of an op."""
    stems = sorted(map(stem, ops.ALL))
    assert sorted(p.stem for p in (ROOT / folder).glob("*.py") if p.stem != "__init__") == stems


@each_backend
def test_every_op_has_a_rule(backend):
    assert set(backend.RULES) == set(ops.ALL)


@each_op
@each_backend
def test_rule_lies_in_the_file_of_its_op(op, backend):
    assert backend.RULES[op].__module__ == f"{backend.__name__}.{stem(op)}"
    assert op.__module__ == f"{ops.__name__}.{stem(op)}"


@each_op
@each_backend
def test_rule_takes_operands_by_position_and_parameters_by_keyword(op, backend):
    """On streams a rule gets by name what its op uses, and a collective's is a generator: one turn a rank and round."""
    signature = inspect.signature(backend.RULES[op])
    kinds = {name: p.kind for name, p in signature.parameters.items()}
    positional = [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    keywords = {name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY}
    on_streams = backend in (ascend, cuda)  # where the interpreter passes what an op uses, and ranks take turns
    used = set(op.uses) if on_streams else set()
    assert keywords == {a.name for a in attrs.fields(op)} | ({"rank"} if op.needs_rank else set()) | used
    assert inspect.isgeneratorfunction(backend.RULES[op]) == (on_streams and op.communicates is not None)
    assert len(positional) == (1 if op.communicates else len(op.operands))
    assert op.communicates or tuple(positional) == op.operands


@each_op
def test_formula_stands_first(op):
    module = importlib.import_module(op.__module__)
    assert module.__doc__ and " = " in module.__doc__
    assert "__doc__" in vars(op) and (op.__doc__ or "").strip()
