"""Bring a weight into the device's cache before it is read.

    out = nothing: no value depends on it

An effect without a result: issued on its stream behind `after`, which is not
looked at, and never waited for by the weight's readers.  What it is worth is
the device's; a backend that has no such operator does nothing.
Source: `npu_prefetch` of torch_npu; vLLM-Ascend's prefetch of `o_proj`.
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.op import Op


@frozen
class Prefetch(Op):
    """`weight`, any tensor, `after`, any value that is there before -> nothing."""

    operands: ClassVar = {"weight": "any", "after": "any"}
    results: ClassVar = ()

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """No result."""
        return ()
