"""Files stay short, and what is public says what it is."""

import ast

import pytest

from tests.test_imports import ROOT, SOURCES

TESTS = sorted((ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_at_most_450_lines(path):
    assert len(path.read_text().splitlines()) <= 450


def public(path):
    """Public functions and classes of a module, methods of public classes included."""
    stack = list(ast.parse(path.read_text()).body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                stack += node.body


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_names_are_documented_and_annotated(path):
    assert ast.get_docstring(ast.parse(path.read_text())), path
    hidden = path.stem in ("adversary", "check")  # their classes with a leading underscore hold the methods
    for node in public(path):
        assert hidden or ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"
        if isinstance(node, ast.FunctionDef):
            arguments = [a for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg != "self"]
            bare = [a.arg for a in arguments if a.annotation is None and a.arg != "cls"]
            assert not bare and node.returns is not None, f"{path.name}: {node.name} must be annotated: {bare}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, f"{path.name}: {node.name}"
