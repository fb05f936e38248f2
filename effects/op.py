"""Descriptors: what is computed, as inert data.

An `Op` holds static parameters only: no tensor, no callable, no backend.  What
it says of itself are class attributes:

    operands      operand -> axes and kind, as in {"recv": "W T N L", "slots": "T int64", "lengths": "B host"}
    results       names of the results; none where the op is issued for its effect alone, as a prefetch is
    writes        operand -> result: that result is the operand's next version, in the same memory
    views         result -> operand: that result is a view of the operand, in the same memory, and no version of its own
    uses          workspaces that the op needs for itself while it runs; a parameter may name one
    communicates  how it meets the other ranks of its `group`: "all_gather", "all_to_all", "all_to_all_v", "all_reduce",
                  or None
    alike         whether every rank of its group gets the same results where it communicates, bit for bit
    waits         whether its rule waits for the device, to read there what decides what it does next

Every op reads all its operands, and has at least one.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast

from attrs import frozen

from mla_fx.effects.aval import Aval, match, operand
from mla_fx.effects.group import Group
from mla_fx.effects.validate import InputError as InputError

#: How ranks meet: each gets what all sent; each gets its own part of what all sent, parts of one size or, with "_v", of
#: any number of rows; each gets the sum.
Meeting = Literal["all_gather", "all_to_all", "all_to_all_v", "all_reduce"]


@frozen
class Op:
    """Base of all descriptors.  Subclasses are `@frozen`; their fields are parameters, checked when an op is made.

    An op with a field `group` is one rank's part of what the group does together; any other gives the same results on
    all ranks where it is given the same operands.
    """

    operands: ClassVar[Mapping[str, str]] = MappingProxyType({})
    results: ClassVar[tuple[str, ...]] = ("out",)
    writes: ClassVar[Mapping[str, str]] = MappingProxyType({})
    views: ClassVar[Mapping[str, str]] = MappingProxyType({})
    communicates: ClassVar[Meeting | None] = None
    alike: ClassVar[bool] = False
    waits: ClassVar[bool] = False

    @property
    def uses(self) -> tuple[str, ...]:
        """Workspaces that the op needs for itself while it runs."""
        return ()

    @property
    def name(self) -> str:
        """The op's stem: `HistoryAttention` is `history_attention`."""
        return self._said().name

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Avals of the results from the sizes of the axes and the floating dtype; raises `ShapeError`."""
        raise NotImplementedError(f"{type(self).__name__} has no shape rule")

    def work(self, axes: Mapping[str, int], lengths: Mapping[str, Sequence[int]]) -> int:
        """Multiply-adds of its matrix products, from the sizes of the axes and its host operands by name.

        What is no product, as elementwise work or a softmax, is not counted; what a mask hides is none either.
        """
        return 0

    def value_rule(self, avals: Mapping[str, Aval], values: Mapping[str, Any]) -> None:
        """Check integer operands by value before a run; raises `InputError`.

        `avals` has every operand by name, `values` the integer ones as NumPy
        arrays (host integers as tuples).  Called only when all of these are
        inputs of the program that come from the host; nothing has run by then.
        Once for launches that differ in features only, the last axis of a
        floating operand, which therefore must decide nothing here.
        """

    def definition(self, *operands: Any) -> tuple[Any, ...] | None:
        """The op in simpler ops, applied to values; None for an op that is not made of others.

        An op with a definition runs on every backend that runs its parts.  The parts do not communicate.
        """
        return None

    def infer(self, *operands: Aval) -> tuple[Aval, ...]:
        """Avals of the results, after the operands have been held against what the op says of them."""
        return _inferred(self, operands)

    def handed(self, *operands: Aval) -> int:
        """Bytes that a rank hands to the transport where the op communicates; at most, where data decides."""
        return sum(one.bytes_ for one in operands)

    def group_of(self) -> Group | None:
        """The group whose part the op is; None for an op of a rank alone."""
        return getattr(self, "group", None)

    def written(self) -> Mapping[int, int]:
        """Position of each operand that is written -> position of the result that is its next version."""
        return self._said().written

    def viewed(self) -> Mapping[int, int]:
        """Position of each result that is a view -> position of the operand in whose memory it lies."""
        return self._said().viewed

    def on_host(self) -> frozenset[int]:
        """Positions of the operands that stay on the host."""
        return self._said().on_host

    def _said(self) -> "_Said":
        return _said(cast("Hashable", type(self)))


@lru_cache(maxsize=4096)
def _inferred(op: Op, operands: tuple[Aval, ...]) -> tuple[Aval, ...]:
    # The layers of a model are the same ops on the same shapes, and a step is read by many: bind, law, backends.
    return op.shape_rule(*match(op.name, op.operands, operands))


def stem(op: type[Op]) -> str:
    """File name of an op's story: `AllToAll` -> `all_to_all`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", op.__name__).lower()


@frozen
class _Said:
    """What the class attributes of an op come to, worked out once."""

    name: str
    written: Mapping[int, int]
    viewed: Mapping[int, int]
    on_host: frozenset[int]


@cache
def _said(op: type[Op]) -> _Said:
    names = list(op.operands)
    written = {names.index(operand): op.results.index(result) for operand, result in op.writes.items()}
    on_host = frozenset(k for k, text in enumerate(op.operands.values()) if operand(text).on_host)
    return _Said(stem(op), MappingProxyType(written), MappingProxyType(_viewed(op, on_host)), on_host)


def _viewed(op: type[Op], on_host: frozenset[int]) -> dict[int, int]:
    """What `views` says, by position; raises `InputError` where it cannot be so."""
    names, found = list(op.operands), dict[int, int]()
    for result, source in op.views.items():
        where = f"{stem(op)}.views"
        if result not in op.results or source not in names:
            raise InputError(f"{where}: must give an operand for a result: got {result!r}: {source!r}")
        if result in op.writes.values() or source in op.writes:
            raise InputError(f"{where}: what is written has a next version, and no view beside it: got {source!r}")
        if names.index(source) in on_host or op.communicates:
            raise InputError(f"{where}: must be of memory of this rank's device: got {source!r}")
        found[op.results.index(result)] = names.index(source)
    return found
