"""A process that emulates nothing says what it imports and what it is told, as JSON: see `test_apart.py`."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.processes import Member


def imported(name: str) -> list[str]:
    """What of torch_npu is there after an import."""
    importlib.import_module(name)
    return sorted(module for module in sys.modules if module.split(".")[0] == "torch_npu")


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> dict[str, Any]:
    """In this order: an import that goes wrong cannot be taken back."""
    found: dict[str, Any] = {}
    for name in ("torch", "mla_fx.backends.ascend.emulator", "mla_fx.backends.body", *sys.argv[1:]):
        found[f"import {name}"] = imported(name)
    found["in sight"] = importlib.util.find_spec("torch_npu") is not None
    found["loaded with torch"] = [entry.name for entry in importlib.metadata.entry_points(group="torch.backends")]
    from mla_fx import backends, cli
    from mla_fx.backends.ascend.emulator import emulate

    found["get"] = error_of(lambda: backends.get("ascend"))
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        found["status"] = cli.main(["decode", "--backend", "ascend"])
    found["decode"] = told.getvalue()
    sys.modules["torch_npu"] = types.ModuleType("torch_npu")
    found["too late"] = error_of(emulate)
    return found


def forked(member: "Member") -> dict[str, Any]:
    """In a process forked from one that has loaded torch and the CPU's backends."""
    return main()


if __name__ == "__main__":
    print(json.dumps(main()))
