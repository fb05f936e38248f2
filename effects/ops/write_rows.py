"""Write the rows of the new tokens into this rank's paged cache.

    cache[slot // S, slot % S] = rows[t]        slot = slots[t]; nothing where slot = -1

A token's slot is -1 on all ranks but its owner's, and for padding.  Slots that
are not -1 are distinct.  The cache is a state: the result is its next version,
in the same memory.  Source: vLLM's slot mapping.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.op import Op
from mla_fx.effects.validate import InputError


@frozen
class WriteRows(Op):
    """`cache` [C, S, F], `rows` [T, F], `slots` int64 [T] -> `cache`, its next version."""

    operands: ClassVar = {"cache": "C S F", "rows": "T F", "slots": "T int64"}
    results: ClassVar = ("cache",)
    writes: ClassVar = {"cache": "cache"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Cache and new rows have one dtype."""
        return (Aval((axes["C"], axes["S"], axes["F"]), dtype),)

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Every slot is -1 or a row of the cache, and no row is written twice."""
        blocks, size, _ = avals["cache"].shape
        written = [slot for slot in values["slots"].tolist() if slot != -1]
        if written and not 0 <= min(written) <= max(written) < blocks * size:
            wrong = next(slot for slot in written if not 0 <= slot < blocks * size)
            raise InputError(
                f"slots: each must be -1 or in 0..{blocks * size - 1} ({blocks} blocks of {size}): got {wrong}"
            )
        if len(set(written)) < len(written):
            raise InputError(f"slots: no two tokens may have one slot: got {sorted(written)}")
