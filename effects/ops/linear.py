"""Project features with a checkpoint weight.

    out[t, f] = sum_d x[t, d] * weight[f, d]

Source: `torch.nn.Linear` without bias, the layout of the checkpoint's `*_proj.weight`.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval
from mla_fx.effects.op import Op


@frozen
class Linear(Op):
    """`x` [T, D], `weight` [F, D] -> [T, F]."""

    operands: ClassVar = {"x": "T D", "weight": "F D"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """One floating dtype; D must agree."""
        return (Aval((axes["T"], axes["F"]), dtype),)

    def work(self, axes: Mapping[str, int], lengths: Mapping[str, Sequence[int]]) -> int:
        """A product for each token and feature."""
        return axes["T"] * axes["D"] * axes["F"]
