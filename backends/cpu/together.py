"""Rules of this backend are written for several ranks at once; the rule of one rank is that of a single one.

Between two steps through weights a call finds nothing of itself in the
processor's caches, and its preparation costs what a small part of the work
does: so it is prepared once, and the library is called once, for all ranks.
"""

from collections.abc import Sequence
from functools import wraps
from typing import Any

from mla_fx.backends.device import Run
from mla_fx.backends.several import Several
from mla_fx.backends.table import Rule


def alone(several: Rule) -> Rule:
    """The rule of one rank, of one for several."""

    @wraps(several)
    def rule(*operands: Any, run: Run, **parameters: Any) -> tuple[Any, ...]:
        return tuple([one for (one,) in several(*zip(operands, strict=False), runs=(run,), **parameters)])

    return rule


def together(several: Rule) -> Rule:
    """`Table.together` of a rule that takes every rank's operands to lie as those of the first do."""
    single = alone(several)

    @wraps(several)
    def rule(*operands: Sequence[Any], runs: Sequence[Run], **parameters: Any) -> Sequence[Sequence[Any]]:
        if all([Several.of(one).alike for one in operands]):
            results: Sequence[Sequence[Any]] = several(*operands, runs=runs, **parameters)
            return results
        return one_by_one(single, *operands, runs=runs, **parameters)

    return rule


def one_by_one(rule: Rule, *operands: Sequence[Any], runs: Sequence[Run], **parameters: Any) -> Sequence[Sequence[Any]]:
    """What a rule gives each rank, side by side."""
    found = [rule(*mine, run=run, **parameters) for *mine, run in zip(*operands, runs, strict=True)]
    return list(zip(*found, strict=True))
