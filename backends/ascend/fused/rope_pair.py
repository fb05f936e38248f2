"""The rotations of the query and of the key, by the same angles, as one: an op, its rule, and the pass that finds them.

    q_rope, k_rope = rope(q, cos, sin, heads), rope(kv, cos, sin)

Beside wide angles npu_rotary_mul wants what it rotates wide too.  So a token's
heads are copied into a wide buffer, its key behind them, and de-interleaved on
the way; one call rotates all, and each is narrowed into memory of its own.
Beside angles of the dtype of `x` a rotation is one launch by itself, and is
left alone.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from attrs import field, frozen

from mla_fx.backends.ascend.rope import MOST, fits, turned, widen
from mla_fx.backends.device import Run
from mla_fx.backends.table import Fusion
from mla_fx.effects import Aval, Equation, Found, Op, Step, Value, bind, ops, rewrite
from mla_fx.effects.validate import integer


@frozen
class RopePair(Op):
    """`x` [T, heads * D], `y` [T, K], `cos`, `sin` [T, R] -> [T, heads, R] and [T, R].  See `ops.Rope`."""

    heads: int = field(validator=integer(1))
    operands: ClassVar = {"x": "T D", "y": "T K", "cos": "T R either", "sin": "T R either"}
    results: ClassVar = ("first", "second")

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """As of each."""
        return tuple(
            shape
            for heads, features in ((self.heads, axes["D"]), (None, axes["K"]))
            for shape in ops.Rope(heads).shape_rule({**axes, "D": features}, dtype)
        )

    def definition(self, *operands: Value) -> tuple[Value, ...]:
        """One after the other."""
        x, y, cos, sin = operands
        return (*bind(ops.Rope(self.heads), x, cos, sin), *bind(ops.Rope(None), y, cos, sin))


def takes(op: RopePair, x: Aval, y: Aval, cos: Aval, sin: Aval) -> str | None:
    """Wide angles, and sizes that the operator takes."""
    for name, aval in (("cos", cos), ("sin", sin)):
        if aval.dtype != "fp32":
            return f"{name}: a pair of rotations on ascend needs fp32: got {aval}"
    if not fits(op.heads + 1, cos.shape[1]):
        return f"heads and R: a pair of rotations on ascend needs {MOST}: got {op.heads + 1} and {cos.shape[1]}"
    return None


def rule(
    x: torch.Tensor, y: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, run: Run, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Five calls, where one after the other are six."""
    tokens, features = cos.shape
    first, second = x.new_empty((tokens, heads, features)), x.new_empty((tokens, features))
    if tokens:
        wide = x.new_empty((tokens, heads + 1, features), dtype=torch.float32)
        widen(x, wide[:, :heads])
        widen(y, wide[:, heads:])
        both = turned(wide, cos, sin)
        first.copy_(both[:, :heads])
        second.copy_(both[:, heads])
    return first, second


def find(step: Step) -> Step:
    """The step with every rotation of a key, and that of heads by the same angles before it, as one."""
    avals = step.avals()
    heads: dict[tuple[str, ...], Equation] = {}  # angles -> the last rotation of heads by them that has no key yet

    def match(step: Step, equation: Equation) -> Found | None:
        if not isinstance(equation.op, ops.Rope):
            return None
        angles = equation.operands[1:]
        if equation.op.heads is not None:
            heads[angles] = equation
            return None
        first = heads.pop(angles, None)
        if first is None:
            return None
        assert isinstance(first.op, ops.Rope) and first.op.heads is not None
        op = RopePair(first.op.heads)
        operands = (first.operands[0], *equation.operands)
        if takes(op, *(avals[name] for name in operands)) is not None:
            return None
        return Found((first, equation), Equation(op, operands, first.results + equation.results, equation.tag))

    return rewrite(step, match)


FUSION: Final = Fusion(RopePair, rule, takes, find)
