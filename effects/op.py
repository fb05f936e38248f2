"""Descriptors: what is computed, as inert data.

An `Op` holds static parameters only: no tensor, no callable, no backend.
`bind` applies it to values and gives values; nothing runs.  A `Value` is
"result i of this call", so a computation is a graph of calls that hang
together by their operands.  Declared effects are class attributes:

    writes        operand -> result: that result is the operand's next version, in the same memory
    uses          scratch that the op needs for itself while it runs
    communicates  the group whose ranks must all run it, or None

Every op reads all its operands, and has at least one.
"""

import itertools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from attrs import field, frozen

from mla_fx.effects.aval import Aval, ShapeError


class InputError(ValueError):
    """A value that an input may not have: names the field, what it must be, and what it was."""


@frozen
class Op:
    """Base of all descriptors.  Subclasses are `@frozen` and add their parameters."""

    operands: ClassVar[tuple[str, ...]] = ()
    results: ClassVar[tuple[str, ...]] = ("out",)
    writes: ClassVar[Mapping[int, int]] = MappingProxyType({})
    uses: ClassVar[tuple[str, ...]] = ()
    communicates: ClassVar[str | None] = None
    #: True when a rule needs to know which rank it runs on; it then gets `rank`.
    needs_rank: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The op's stem: `HistoryAttention` is `history_attention`."""
        return stem(type(self))

    def shape_rule(self, *operands: Any) -> tuple[Aval, ...]:
        """Avals of the results from those of the operands; raises `ShapeError`."""
        raise NotImplementedError(f"{type(self).__name__} has no shape rule")

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Check integer operands by value before a run; raises `InputError`.

        `avals` has every operand by name, `values` the integer ones as NumPy
        arrays (host integers as tuples).  Called only when all of these are
        inputs of the program; nothing has run by then.
        """

    def infer(self, *operands: Aval) -> tuple[Aval, ...]:
        """`shape_rule`, after the number of operands has been checked."""
        if len(operands) != len(self.operands) or not operands:
            raise ShapeError(
                f"{self.name} takes {len(self.operands)} operands ({', '.join(self.operands)}): got {len(operands)}"
            )
        return self.shape_rule(*operands)


def stem(op: type[Op]) -> str:
    """File name of an op's story: `AllToAll` -> `all_to_all`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", op.__name__).lower()


# Calls are numbered as they are made, so that a schedule can issue them in the
# order in which the author wrote them; the number has no other meaning.
_serial = itertools.count()


@frozen(eq=False, repr=False)
class Call:
    """An op applied to values.  Compared by identity."""

    op: Op
    operands: tuple["Value", ...]
    serial: int = field(factory=lambda: next(_serial))

    def __repr__(self) -> str:
        return f"{self.op.name}({', '.join(value.name for value in self.operands)})"


@frozen(eq=False, repr=False)
class Value:
    """A tensor to be: result `index` of `call`, or an input of the program when `call` is None."""

    aval: Aval
    name: str
    call: Call | None = None
    index: int = 0

    def __repr__(self) -> str:
        return f"{self.name}: {self.aval}"


def arg(name: str, shape: tuple[int, ...], dtype: str) -> Value:
    """An input of a program.

    >>> arg("hidden", (4, 7168), "bf16")
    hidden: bf16[4, 7168]
    """
    return Value(Aval(tuple(shape), dtype), name)


def bind(op: Op, *operands: Value, names: tuple[str, ...] | None = None) -> tuple[Value, ...]:
    """Describe `op` applied to `operands`; nothing runs.

    `names` are the names the results get in a listing (made unique there);
    by default those the op declares.  Raises `ShapeError`.
    """
    for value in operands:
        if not isinstance(value, Value):
            raise TypeError(f"{op.name}: every operand must be a Value: got {type(value).__name__}")
    avals = op.infer(*(value.aval for value in operands))
    call = Call(op, operands)
    return tuple(
        Value(aval, name, call, index)
        for index, (aval, name) in enumerate(zip(avals, names or op.results, strict=True))
    )
