"""Fused ops: a file each, which holds the op, its definition, its rule, what it takes, and the pass that finds it.

What lies here is on: `ALL` has the `FUSION` of every file, in the order of their names.
"""

if __name__ != "mla_fx.backends.cpu.fused":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.cpu.fused', not {__name__!r}")

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from mla_fx.backends.table import Fusion

#: All of them.
ALL: Final[tuple[Fusion, ...]] = tuple(
    import_module(f"{__name__}.{name}").FUSION for name in sorted(module.name for module in iter_modules(__path__))
)
