"""A program of toy ops with integers on the host, on two streams: sums that anybody can do in their head."""

from typing import Any, ClassVar

import torch
from attrs import frozen

from mla_fx.backends import Run
from mla_fx.effects import Aval, Input, Launch, Op, Program, Record, Wait

SHAPE = Aval((2,), "fp32")


@frozen
class Plus(Op):
    """`x` [D] and host integers `n` [B] -> x + sum n, in workspace `pad`."""

    operands: ClassVar = {"x": "D", "n": "B host"}
    uses: ClassVar = ("pad",)

    def shape_rule(self, axes: Any, dtype: str) -> tuple[Aval, ...]:
        return (Aval((axes["D"],), dtype),)


@frozen
class Twice(Op):
    """`x` [D] -> 2 x."""

    operands: ClassVar = {"x": "D"}

    def shape_rule(self, axes: Any, dtype: str) -> tuple[Aval, ...]:
        return (Aval((axes["D"],), dtype),)


def plus(x: torch.Tensor, n: tuple[int, ...], *, run: Run) -> tuple[torch.Tensor]:
    out = torch.empty_like(x)
    room = run.scratch("pad").room(len(n), lambda: 8 * len(n))
    run.device.issue(add, (x, out, room), (n,))
    return (out,)


def add(tensors: Any, host: Any) -> None:
    x, out, room = tensors
    torch.add(x, sum(host[0]), out=out)
    room.fill_(host[0][0] % 251)


def twice(x: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    return (x * 2,)


RULES = {Plus: plus, Twice: twice}
LENGTHS = Aval((2,), "int64")
SUMS = Program(
    (Input("x", SHAPE), Input("n", LENGTHS, "host"), Input("m", LENGTHS, "host")),
    ("c", "d", "x"),
    (
        Launch("main", Plus(), ("x", "n"), ("a",)),
        Launch("main", Twice(), ("a",), ("b",)),
        Launch("main", Plus(), ("b", "m"), ("c",)),
        Record("main", "ready"),
        Wait("side", "ready"),
        Launch("side", Plus(), ("b", "n"), ("d",)),
        Record("side", "done"),
        Wait("main", "done"),
    ),
)


def sums(x: torch.Tensor, n: Any, m: Any) -> list[list[float]]:
    b = [2 * (value + sum(n)) for value in x.tolist()]
    return [[value + sum(m) for value in b], [value + sum(n) for value in b]]
