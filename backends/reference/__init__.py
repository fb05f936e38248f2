"""The definition: every op in float64, written line for line from the formula of its descriptor.

Slow on purpose where the formula is a loop.  What the lengths do not reach is
never read, so it may hold anything.
"""

if __name__ != "mla_fx.backends.reference":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.reference', not {__name__!r}")

from collections.abc import Mapping
from typing import Final

from mla_fx.backends.backend import Rule, rules_of
from mla_fx.effects import Op

#: Op to rule.  A rule takes tensors and the op's parameters, and returns a tuple of new tensors.
RULES: Final[Mapping[type[Op], Rule]] = rules_of(__name__)
