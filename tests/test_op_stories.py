"""One op, one stem: descriptor, a rule in each backend, a test; `git ls-files '*combine*'` is the index of combine."""

import importlib
import inspect
from pathlib import Path

import attrs
import pytest

from mla_fx.backends import ascend, cpu, reference
from mla_fx.effects import ops
from mla_fx.effects.op import stem

BACKENDS = {"reference": reference, "cpu": cpu, "ascend": ascend}
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
#: What a backend has no rule for: routed experts and 8-bit weights, on Ascend.
MISSING: dict[object, set[type]] = {
    ascend: {
        ops.GatingTopK,
        ops.PermuteTokens,
        ops.GroupedLinear,
        ops.UnpermuteTokens,
        ops.QuantLinear,
        ops.QuantGroupedLinear,
    }
}
ROOT = Path(__file__).parents[1]
PLACES = (
    "effects/ops/{}.py",
    "backends/reference/{}.py",
    "backends/cpu/{}.py",
    "tests/ops/test_{}.py",
)
each_op = pytest.mark.parametrize("op", ops.ALL, ids=stem)


@each_op
@pytest.mark.parametrize("place", PLACES)
def test_story_is_whole(op, place):
    assert (ROOT / place.format(stem(op))).is_file()


@pytest.mark.parametrize("folder", ["effects/ops", "backends/reference", "backends/cpu"])
def test_no_file_is_without_an_op(folder):
    """An op that has a file stands in `ops.ALL`, once; a rule that has a file is the rule of an op."""
    stems = sorted(map(stem, ops.ALL))
    assert sorted(p.stem for p in (ROOT / folder).glob("*.py") if p.stem != "__init__") == stems


@each_backend
def test_every_op_has_a_rule(backend):
    assert set(backend.RULES) == set(ops.ALL) - MISSING.get(backend, set())


def test_no_file_of_ascend_is_without_an_op():
    """What several rules need is in a folder of its own."""
    stems = sorted(map(stem, set(ops.ALL) - MISSING[ascend]))
    assert sorted(p.stem for p in (ROOT / "backends/ascend").glob("*.py") if p.stem != "__init__") == stems


each_rule = pytest.mark.parametrize(
    ("op", "backend"),
    [(op, backend) for backend in BACKENDS.values() for op in ops.ALL if op not in MISSING.get(backend, set())],
    ids=lambda given: stem(given) if isinstance(given, type) else given.__name__.split(".")[-1],
)


@each_rule
def test_rule_lies_in_the_file_of_its_op(op, backend):
    assert backend.RULES[op].__module__ == f"{backend.__name__}.{stem(op)}"
    assert op.__module__ == f"{ops.__name__}.{stem(op)}"


@each_rule
def test_rule_takes_operands_by_position_and_parameters_by_keyword(op, backend):
    signature = inspect.signature(backend.RULES[op])
    kinds = {name: p.kind for name, p in signature.parameters.items()}
    positional = [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    keywords = {name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY}
    scratch = set(op.uses) if backend is ascend else set()  # on a device the interpreter passes it
    assert keywords == {a.name for a in attrs.fields(op)} | ({"rank"} if op.needs_rank else set()) | scratch
    assert len(positional) == (1 if op.communicates else len(op.operands))
    assert op.communicates or tuple(positional) == op.operands


@each_op
def test_formula_stands_first(op):
    module = importlib.import_module(op.__module__)
    assert module.__doc__ and " = " in module.__doc__
    assert "__doc__" in vars(op) and (op.__doc__ or "").strip()
