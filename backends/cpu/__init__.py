"""Fast on a CPU: native dtypes, accumulation in float32 (float64 beside float64), few calls an op.

Results have the operands' dtype.  Nothing is widened as a whole: the history
goes by in tiles.  What the lengths do not reach never enters the arithmetic.
"""

if __name__ != "mla_fx.backends.cpu":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.cpu', not {__name__!r}")

from collections.abc import Mapping
from typing import Final

from mla_fx.backends.backend import Rule, rules_of
from mla_fx.effects import Op

#: Op to rule.  A rule takes tensors and the op's parameters, and returns a tuple of new tensors.
RULES: Final[Mapping[type[Op], Rule]] = rules_of(__name__)
