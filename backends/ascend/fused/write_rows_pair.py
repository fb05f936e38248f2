"""Two cache writes with the same slots as one operator: an op, its rule, and the pass that finds such pairs.

    first, second = write_rows(first, rows, slots), write_rows(second, rows, slots)

are the latent and the rope cache of a layer.  Fused, they are one launch of the
program and one call of npu_scatter_pa_kv_cache.  Every other backend, and the
reference, run the op by its definition.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from attrs import frozen

from mla_fx.backends.ascend.calls import scatter
from mla_fx.backends.device import Run
from mla_fx.backends.table import Fusion
from mla_fx.effects import Aval, Equation, Found, Op, Step, Value, bind, ops, rewrite


@frozen
class WriteRowsPair(Op):
    """`first` [C, S, L], `second` [C, S, R], `first_rows` [T, L], `second_rows` [T, R], `slots` int64 [T].

    Gives the next versions of both caches.  See `ops.WriteRows`.
    """

    operands: ClassVar = {
        "first": "C S L",
        "second": "C S R",
        "first_rows": "T L",
        "second_rows": "T R",
        "slots": "T int64",
    }
    results: ClassVar = ("first", "second")
    writes: ClassVar = {"first": "first", "second": "second"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Both caches have the same blocks, and all floats one dtype."""
        return tuple(Aval((axes["C"], axes["S"], axes[features]), dtype) for features in "LR")

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Slots as for one cache."""
        ops.WriteRows().value_rule({"cache": avals["first"]}, values)

    def definition(self, *operands: Value) -> tuple[Value, ...]:
        """One write after the other."""
        first, second, first_rows, second_rows, slots = operands
        return (*bind(ops.WriteRows(), first, first_rows, slots), *bind(ops.WriteRows(), second, second_rows, slots))


def takes(op: WriteRowsPair, first: Aval, second: Aval, *rows: Aval) -> str | None:
    """Caches that the operator writes."""
    return scatter.takes("first", first) or scatter.takes("second", second)


def rule(
    first: torch.Tensor,
    second: torch.Tensor,
    first_rows: torch.Tensor,
    second_rows: torch.Tensor,
    slots: torch.Tensor,
    *,
    run: Run,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the rows whose slot is not -1, in place, both caches in one call."""
    scatter.scatter((first, second), (first_rows, second_rows), slots)
    return first, second


def find(step: Step) -> Step:
    """The step with every two writes that follow each other with the same slots, into equal blocks, made one."""
    avals = step.avals()
    last: dict[str, Equation] = {}  # slots -> the last write with them
    before: dict[tuple[str, ...], Equation] = {}  # results of a write -> the write before it
    for equation in step.equations:
        if isinstance(equation.op, ops.WriteRows):
            slots = equation.operands[2]
            if slots in last:
                before[equation.results] = last[slots]
            last[slots] = equation

    def match(step: Step, equation: Equation) -> Found | None:
        other = before.get(equation.results)
        if other is None:
            return None
        (first, rows, slots), (second, second_rows, _) = other.operands, equation.operands
        one, two = avals[first], avals[second]
        if one.shape[:2] != two.shape[:2] or one.dtype != two.dtype or second in other.results:
            return None
        operands = (first, second, rows, second_rows, slots)
        whole = Equation(WriteRowsPair(), operands, (*other.results, *equation.results), equation.tag)
        return Found((other, equation), whole)

    return rewrite(step, match)


FUSION: Final = Fusion(WriteRowsPair, rule, takes, find)
