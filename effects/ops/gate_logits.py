"""Affinity of every token to every routed expert, in float32 whatever the activations are.

    logits[t, x] = sum_d float32(x[t, d]) * float32(weight[x, d])

Source: the gate of DeepSeek-V3 as transformers computes it; a logit rounded to
16 bits would change which experts are chosen.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, wide_dtype
from mla_fx.effects.op import Op


@frozen
class GateLogits(Op):
    """`x` [T, D], `weight` [X, D] -> `logits` [T, X] float32 (float64 beside float64)."""

    operands: ClassVar = {"x": "T D", "weight": "X D"}
    results: ClassVar = ("logits",)

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """One floating dtype in, the wide one out."""
        return (Aval((axes["T"], axes["X"]), wide_dtype(dtype)),)

    def work(self, axes: Mapping[str, int], lengths: Mapping[str, Sequence[int]]) -> int:
        """A product for each token and expert."""
        return axes["T"] * axes["D"] * axes["X"]
