"""One op, one stem: descriptor, rules, a test; `git ls-files '*combine*'` is the index of combine."""

import ast
import importlib
import inspect
from pathlib import Path

import attrs
import pytest

from mla_fx.backends import ascend, common, cpu, cuda, reference
from mla_fx.backends.table import Collective
from mla_fx.effects import Op, ops
from mla_fx.effects.op import stem

BACKENDS = {"reference": reference, "cpu": cpu, "ascend": ascend, "cuda": cuda}
#: Where a rule may stand: what a backend does its own way, and what backends share.
FOLDERS = {**BACKENDS, "common": common}
ROOT = Path(__file__).parents[1]
HALVES = ("send", "receive")
each_op = pytest.mark.parametrize("op", ops.ALL, ids=stem)
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
each_folder = pytest.mark.parametrize("folder", FOLDERS)


def modules(folder):
    """The modules of a folder of rules, by stem."""
    return {path.stem: path for path in sorted((ROOT / "backends" / folder).glob("*.py")) if path.stem != "__init__"}


def functions(text):
    """What a rule does, or each half of one: code without its docstring, imported names by where they are from."""
    tree = ast.parse(text)
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    origin = {name.asname or name.name: f"{node.module}.{name.name}" for node in imports for name in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = origin.get(node.id, node.id)
    return {name: body(found[name]) for name in ("rule", "several", *HALVES) if name in found}


def body(node):
    told = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
    return "\n".join(ast.dump(part) for part in node.body[told:])


def rules_of(table, op):
    rule = table.rules[op]
    found = (rule.send, rule.receive, rule.together) if isinstance(rule, Collective) else (rule, table.together.get(op))
    return [one for one in found if one is not None]


@each_op
@pytest.mark.parametrize("place", ["effects/ops/{}.py", "tests/ops/test_{}.py"])
def test_descriptor_and_test_have_a_file(op, place):
    assert (ROOT / place.format(stem(op))).is_file()


def test_no_descriptor_is_without_an_op():
    """An op that has a file stands in `ops.ALL`, once."""
    found = [path.stem for path in (ROOT / "effects/ops").glob("*.py") if path.stem != "__init__"]
    assert sorted(found) == sorted(map(stem, ops.ALL))


@each_op
def test_a_rule_lies_in_the_file_of_its_op(op):
    """In each backend's own folder or in the common one; of a collective, each of its halves."""
    assert op.__module__ == f"{ops.__name__}.{stem(op)}"
    for backend in BACKENDS.values():
        homes = {common.__name__, backend.__name__}
        for rule in rules_of(backend.TABLE, op):
            home, _, name = rule.__module__.rpartition(".")
            assert home in homes and name == stem(op)


@each_folder
def test_every_rule_that_has_a_file_is_the_rule_of_an_op(folder):
    """In this folder's own tables, or, of the common ones, in some backend's; a file without a rule serves rules."""
    tables = [b.TABLE for b in BACKENDS.values()] if folder == "common" else [BACKENDS[folder].TABLE]
    used = {rule.__module__ for table in tables for op in table.rules for rule in rules_of(table, op)}
    used |= {rule.__module__ for table in tables for rule in table.captured.values()}
    text = "".join(path.read_text() for name in FOLDERS for path in (ROOT / "backends" / name).glob("*.py"))
    for name, path in modules(folder).items():
        if functions(path.read_text()):
            assert f"mla_fx.backends.{folder}.{name}" in used
        elif f"mla_fx.backends.{folder}.{name}" not in used:
            assert f"mla_fx.backends.{folder}.{name} import" in text


@each_backend
def test_every_op_has_a_rule(backend):
    """What else a backend has a rule for is made of ops, and stands in its own folder."""
    assert set(ops.ALL) <= set(backend.TABLE.rules)
    for op in set(backend.TABLE.rules) - set(ops.ALL):
        assert op.definition is not Op.definition and op.__module__ == f"{backend.__name__}.fused.{stem(op)}"


@each_backend
def test_what_a_table_says_beside_rules_is_of_its_ops(backend):
    """Refusals are of ops that it has, forms of their operands."""
    table = backend.TABLE
    assert set(table.takes) | set(table.forms) | set(table.together) <= set(table.rules)
    assert all(set(forms) <= set(op.operands) for op, forms in table.forms.items())


@each_backend
def test_rules_have_one_signature(backend):
    """Operands by position under the names of the op, then, by keyword, `run` and the op's fields.

    One for several ranks has the `runs` of them all; on a CPU the one for a single rank is made of it.  What is for all
    ranks of a group together has none.
    """
    for op in backend.TABLE.rules:
        fields = {field.name for field in attrs.fields(op)}
        assert isinstance(backend.TABLE.rules[op], Collective) == (op.communicates is not None)
        for rule in rules_of(backend.TABLE, op):
            kinds = {name: p.kind for name, p in inspect.signature(rule).parameters.items()}
            given = [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
            keywords = {name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY}
            if rule.__name__ == "receive":
                given = given[1:]  # what the transport brings comes first
            assert given == list(op.operands), rule
            where = "runs" if op in backend.TABLE.together else "run"
            assert keywords == {*fields, *[where] * (rule.__name__ != "together")}, rule
            assert set(kinds.values()) <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


@each_op
def test_no_rule_stands_in_two_files(op):
    """Backends whose rules do the same share one."""
    found = {}
    for folder in FOLDERS:
        path = modules(folder).get(stem(op))
        for name, code in functions(path.read_text()).items() if path else ():
            twin = found.setdefault((name, code), folder)
            assert twin == folder, f"{stem(op)}: {name} of {folder} does what that of {twin} does"


def test_two_bodies_that_differ_in_layout_are_one():
    """The comparison sees through docstrings, comments and line breaks, and through nothing else."""
    texts = (
        'from a import f\ndef rule(x):\n    """One."""\n    return (f(x) + 1,)',
        "from a import f\ndef rule(x):\n    # other\n    return (\n        f(x) + 1,\n    )",
        "from a import f\ndef rule(x):\n    return (f(x) + 2,)",
        "from b import f\ndef rule(x):\n    return (f(x) + 1,)",
    )
    one, other, *others = map(functions, texts)
    assert one == other and one not in others


@each_op
def test_formula_stands_first(op):
    module = importlib.import_module(op.__module__)
    assert module.__doc__ and " = " in module.__doc__
    assert "__doc__" in vars(op) and (op.__doc__ or "").strip()
