"""Direction of imports: effects <- mla_fx <- models; only the edges choose a backend; nobody asks for torch_npu."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EDGES = {"cli", "cli_decode", "testing"}  # modules of mla_fx that may import backends and models
SOURCES = sorted(p for top in ("mla_fx", "effects", "backends", "models") for p in (ROOT / top).rglob("*.py") if ".." not in str(p))
SOURCES = [p for p in SOURCES if not any(parent.is_symlink() for parent in p.parents)]


def imported(path: Path) -> list[tuple[str, bool]]:
    """Every imported module, and whether it is imported at module level."""
    tree = ast.parse(path.read_text())
    top = set(map(id, ast.walk(ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], []))))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert all(alias.name != "*" for alias in node.names), f"{path}: no star imports"
            base = node.module or ""
            inner = [f"{base}.{a.name}" for a in node.names if base in ("mla_fx", "mla_fx.effects")]
            found += [(name, id(node) in top) for name in inner or [base]]
    return found


def layer(module: str) -> str:
    """The layer of an imported module: effects, backends, models, mla_fx, or '' for others."""
    parts = module.split(".")
    if parts[0] != "mla_fx":
        return ""
    return parts[1] if len(parts) > 1 and parts[1] in ("effects", "backends", "models") else "mla_fx"


ALLOWED = {
    "effects": {"effects", ""},
    "mla_fx": {"effects", "mla_fx", ""},
    "models": {"effects", "mla_fx", "models", ""},
    "backends": {"effects", "mla_fx", "backends", ""},
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_direction(path):
    top = path.relative_to(ROOT).parts[0]
    edge = top == "mla_fx" and path.stem in EDGES
    for module, _ in imported(path):
        assert edge or layer(module) in ALLOWED[top], f"{path.relative_to(ROOT)} imports {module}"


def test_effects_take_nothing_of_torch_but_its_pytrees():
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] == "effects":
            torch = {module for module, _ in imported(path) if module.split(".")[0] == "torch"}
            assert torch <= ({"torch.utils._pytree"} if path.name == "step.py" else set()), path


def test_the_law_shares_no_code_with_the_scheduler():
    """Both read programs; neither reads the other, nor what the other is made of."""
    check = {m for m, _ in imported(ROOT / "effects/check.py") if layer(m)}
    schedule = {m for m, _ in imported(ROOT / "effects/schedule.py") if layer(m)}
    assert check == {"mla_fx.effects.aval", "mla_fx.effects.program"}
    assert check & schedule == {"mla_fx.effects.program"}


def test_torch_npu_is_never_imported_unasked():
    for path in SOURCES:
        assert not [m for m, top in imported(path) if top and m.split(".")[0] == "torch_npu"], path


def test_every_layer_was_read():
    assert {p.relative_to(ROOT).parts[0] for p in SOURCES} == {"mla_fx", "effects", "backends", "models"}
    assert len(SOURCES) > 60
