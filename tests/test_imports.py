"""Direction of imports: effects <- mla_fx <- models; only the edges choose a backend; nobody asks for torch_npu."""

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from inspect import isfunction
from pathlib import Path

import pytest

from tests.cases import each

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("mla_fx", "effects", "backends", "models")
SOURCES = sorted(
    path
    for top in LAYERS
    for path in (ROOT / top).rglob("*.py")
    if not any(folder.is_symlink() for folder in path.parents)
)
#: What each layer may import of the project.
ALLOWED = {
    "effects": {"effects"},
    "mla_fx": {"effects", "mla_fx"},
    "models": {"effects", "mla_fx", "models"},
    "backends": {"effects", "mla_fx", "backends"},
}


def home(path: Path) -> str:
    """The folder that a file lies in, as the layer it belongs to."""
    return path.relative_to(ROOT).parts[0]


def is_edge(path: Path) -> bool:
    """The command line and the test helpers may choose backends and load models."""
    return home(path) == "mla_fx" and (path.stem in ("cli", "testing") or path.stem.startswith("cli_"))


def layer(module: str) -> str | None:
    """The layer of a module by its full name, None where it is not of this project."""
    parts = module.split(".")
    if parts[0] != "mla_fx":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "mla_fx"


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules that a piece of code imports; `from a import b` counts as a.b, which is the module where b is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import_time(tree: ast.Module) -> Iterator[str]:
    """Modules imported when the module is, and not only when a function of it is called."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            stack += ast.iter_child_nodes(node)


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


each_source = each("path", SOURCES)


def test_every_layer_is_read():
    assert {home(path) for path in SOURCES} == set(LAYERS)
    assert len(SOURCES) > 60


@each_source
def test_module_can_be_imported(path):
    inside = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(inside if home(path) == "mla_fx" else ("mla_fx", *inside)).removesuffix(".__init__")
    if "triton" in at_import_time(parse(path)) and find_spec("triton") is None:
        with pytest.raises(ModuleNotFoundError, match="triton"):
            importlib.import_module(name)
        return
    module = importlib.import_module(name)
    assert Path(module.__file__ or "").resolve() == path


@each_source
def test_direction(path):
    found = {module for module in imported(parse(path)) if layer(module)}
    wrong = {module for module in found if layer(module) not in ALLOWED[home(path)]}
    assert not wrong or is_edge(path), f"{home(path)} must not import {sorted(wrong)}"


@each_source
def test_direction_of_modules_named_in_strings(path):
    """What is imported by name at run time keeps the direction too."""
    constants = [node.value for node in ast.walk(parse(path)) if isinstance(node, ast.Constant)]
    modules = {text for text in constants if isinstance(text, str) and re.fullmatch(r"mla_fx(\.\w+)+", text)}
    wrong = {module for module in modules if layer(module) not in ALLOWED[home(path)]}
    assert not wrong or is_edge(path), f"{home(path)} must not name {sorted(wrong)}"


@each_source
def test_imports_are_absolute_and_explicit(path):
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            assert [alias.name for alias in node.names] != ["*"], f"line {node.lineno}: a star import"
    tops = {module.split(".")[0] for module in imported(parse(path))}
    assert not tops & {"effects", "backends", "models", "tests"}


@each("path", [path for path in SOURCES if home(path) == "effects"])
def test_effects_take_nothing_of_torch_but_its_pytrees(path):
    torch = {module for module in imported(parse(path)) if module.split(".")[0] in ("torch", "torch_npu", "numpy")}
    assert torch <= ({"torch.utils._pytree"} if path.name == "step.py" else set())


def test_the_law_of_a_session_takes_the_value_and_nothing_that_makes_one():
    session = importlib.import_module("mla_fx.effects.session")
    taken = {
        module.rpartition(".")[2]
        for name in ("check_session.py", "session_memory.py")
        for module in imported(parse(ROOT / "effects" / name))
        if ".session." in module
    }
    assert "Session" in taken and not [name for name in taken if isfunction(getattr(session, name))]


def test_the_law_shares_no_code_with_the_scheduler():
    """Both read programs; what the law takes of the project are values and programs, and nothing that schedules."""

    def modules(name: str) -> set[str]:
        return {module.rsplit(".", 1)[0] for module in imported(parse(ROOT / "effects" / name)) if layer(module)}

    check, schedule = modules("check.py"), modules("schedule.py")
    assert check == {"mla_fx.effects.aval", "mla_fx.effects.program"}
    assert "mla_fx.effects.check" not in schedule
    assert check & schedule <= {"mla_fx.effects.program"}
    judge = {module for module in imported(parse(ROOT / "tests" / "effects" / "judge.py")) if layer(module)}
    assert {module.rsplit(".", 1)[1] for module in judge} == {
        "Drop",
        "Keep",
        "Launch",
        "Program",
        "Record",
        "Stage",
        "Wait",
    }


@each_source
def test_triton_is_imported_by_kernels_alone(path):
    """And these are imported where they are launched."""
    kernels = path.relative_to(ROOT).as_posix() == "backends/kernels/exchange.py"
    tops = {module.split(".")[0] for module in imported(parse(path))}
    assert ("triton" in tops) == kernels
    asked = {module for module in at_import_time(parse(path)) if module.startswith("mla_fx.backends.kernels.exchange")}
    assert not asked


@each_source
def test_torch_npu_is_never_imported_unasked(path):
    assert not [module for module in at_import_time(parse(path)) if module.split(".")[0] == "torch_npu"]
