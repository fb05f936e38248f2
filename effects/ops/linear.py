"""Project features with a checkpoint weight.

    out[t, f] = sum_d x[t, d] * weight[f, d]

Source: `torch.nn.Linear` without bias, the layout of the checkpoint's `*_proj.weight`.
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, match, same_dtype
from mla_fx.effects.op import Op


@frozen
class Linear(Op):
    """`x` [T, D], `weight` [F, D] -> [T, F]."""

    operands: ClassVar = ("x", "weight")

    def shape_rule(self, x: Aval, weight: Aval) -> tuple[Aval, ...]:
        """One floating dtype; D must agree."""
        axes = match(self.name, x=(x, "T D"), weight=(weight, "F D"))
        return (Aval((axes["T"], axes["F"]), same_dtype(self.name, x=x, weight=weight)),)
