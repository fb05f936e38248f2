"""Files and functions stay short, and what is public says what it is."""

import ast
from collections.abc import Iterator

import attrs

from tests.cases import each
from tests.test_imports import ROOT, SOURCES, each_source, parse

TESTS = sorted((ROOT / "tests").rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


@attrs.frozen
class Public:
    """A public function or class, by its full name, and whether callers reach it (its class is public too)."""

    name: str
    node: Function | ast.ClassDef
    method: bool


def public(tree: ast.Module) -> Iterator[Public]:
    """What other modules may use: no leading underscore, in no function, in no private class."""
    stack: list[tuple[str, ast.stmt, bool]] = [("", node, False) for node in tree.body]
    while stack:
        prefix, node, method = stack.pop()
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield Public(prefix + node.name, node, method)
            if isinstance(node, ast.ClassDef):
                stack += [(f"{node.name}.", inner, True) for inner in node.body]


def unannotated(node: Function, method: bool) -> list[str]:
    """Parameters (and "return") without a type; the first one of a method needs none, unless it is static."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    if method and not static:
        positional = positional[1:]
    rest = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    bare = [argument.arg for argument in (*positional, *arguments.kwonlyargs, *rest) if argument.annotation is None]
    return bare + (["return"] if node.returns is None else [])


@each("path", [*SOURCES, *TESTS])
def test_at_most_450_lines(path):
    assert len(path.read_text().splitlines()) <= 450


@each_source
def test_module_is_documented(path):
    assert ast.get_docstring(parse(path))


@each_source
def test_public_names_are_documented(path):
    bare = [found.name for found in public(parse(path)) if not ast.get_docstring(found.node)]
    assert not bare, f"no docstring: {', '.join(bare)}"


@each_source
def test_functions_are_annotated(path):
    tree = parse(path)
    methods = {id(node) for owner in ast.walk(tree) if isinstance(owner, ast.ClassDef) for node in owner.body}
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    bare = {node.name: unannotated(node, id(node) in methods) for node in functions}
    assert not any(bare.values()), {name: names for name, names in bare.items() if names}


@each_source
def test_functions_are_short(path):
    """At most 80 lines; what is written for reading has 5 to 40."""
    for node in ast.walk(parse(path)):
        if isinstance(node, Function):
            assert (node.end_lineno or 0) - node.lineno < 80, node.name


def test_the_checks_see_what_is_missing():
    """The two helpers on code that lacks each thing once."""
    tree = ast.parse(
        "class A:\n  def f(self, x, *, y: int, **z) -> int: ...\n  def _g(self): ...\nclass _B:\n  def h(): ..."
    )
    found = {item.name: item for item in public(tree)}
    assert set(found) == {"A", "A.f"}
    assert unannotated(found["A.f"].node, found["A.f"].method) == ["x", "z"]
