"""A result that is a view of an operand: where the op says so it must be one, and where not it must not.

Plainly and on the hostile machine, with views that are a part of what they are a view of.
"""

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen

from mla_fx.backends import Backend, InProcess, RunError
from mla_fx.backends.contract import ContractError
from mla_fx.effects import MAIN, Aval, Equation, Op, Program, bind, check, schedule, trace

X = Aval((6, 2), "fp32")


@frozen
class Rows(Op):
    """`x` [T, D] -> `count` of its rows, a view: those from `start` on, for each next rank the next, as far as there
    are some."""

    start: int
    count: int
    operands: ClassVar = {"x": "T D"}
    views: ClassVar = {"out": "x"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        return (Aval((self.count, axes["D"]), dtype),)


@frozen
class Doubled(Op):
    """`state` [T, D], twice as large, in place."""

    operands: ClassVar = {"state": "T D"}
    results: ClassVar = ("state",)
    writes: ClassVar = {"state": "state"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        return (Aval((axes["T"], axes["D"]), dtype),)


@frozen
class Next(Op):
    """`x` [T, D] -> x + 1."""

    operands: ClassVar = {"x": "T D"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        return (Aval((axes["T"], axes["D"]), dtype),)


@frozen
class Both(Op):
    """`x`, `y` [T, D] -> a view of x, and x + y."""

    operands: ClassVar = {"x": "T D", "y": "T D"}
    results: ClassVar = ("seen", "sum")
    views: ClassVar = {"seen": "x"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        return (Aval((axes["T"], axes["D"]), dtype),) * 2


def rows(x: torch.Tensor, *, run: Any, start: int, count: int) -> tuple[torch.Tensor]:
    first = min(start + run.rank * count, x.shape[0] - count)
    return (x[first : first + count],)


RULES = {
    Rows: rows,
    Doubled: lambda state, *, run: (state.mul_(2),),
    Next: lambda x, *, run: (x + 1,),
    Both: lambda x, y, *, run: (x[:], x + y),
}
each_machine = pytest.mark.parametrize("seed", [None, 0, 1, 2, 3], ids=lambda seed: f"seed {seed}")


def scheduled(function: Any, aside: tuple[type[Op], ...] = (), **avals: Aval) -> Program:
    def stream(equation: Equation) -> str:
        return "side" if isinstance(equation.op, aside) else MAIN

    program = schedule(trace(function, **avals), stream)
    check(program)
    return program


def ran(program: Program, *arguments: Any, seed: int | None = None, rules: Any = RULES, ranks: int = 1) -> Any:
    return Backend("views", rules, InProcess(ranks), adversary=seed).compile(program)(*arguments)


def counted(start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + 12, dtype=torch.float32).view(6, 2)


@each_machine
def test_a_view_of_a_view_of_what_a_program_made(seed):
    """Each rank has its own rows of it, read beside what goes on."""

    def parts(x):
        (made,) = bind(Next(), x)
        (outer,) = bind(Rows(1, 2), made)
        (inner,) = bind(Rows(0, 1), outer)
        return *bind(Next(), inner), outer

    program = scheduled(parts, (Next,), x=X)
    (inner, _), (outer, other) = ran(program, [counted(), counted(100)], seed=seed, ranks=2)
    assert inner.tolist() == [[4.0, 5.0]] and outer.tolist() == [[3.0, 4.0], [5.0, 6.0]]
    assert other.tolist() == [[107.0, 108.0], [109.0, 110.0]]


@each_machine
def test_a_write_through_a_view_is_seen_by_the_caller(seed):
    def step(cache, x):
        (part,) = bind(Rows(2, 3), cache)
        return *bind(Doubled(), part), *bind(Next(), x)

    program = scheduled(step, (Doubled,), cache=X, x=X)
    assert program.states() == ("cache",)
    cache = counted()
    (part,), _ = ran(program, [cache], [counted()], seed=seed)
    assert cache.tolist() == [[0, 1], [2, 3], [8, 10], [12, 14], [16, 18], [10, 11]]
    assert part.data_ptr() == cache[2:].data_ptr() and torch.equal(part, cache[2:5])


WRONG = {
    "a copy": (
        lambda x, y, *, run: (x.clone(), x + y),
        "seen: is a view of x and must lie in it: got memory elsewhere",
    ),
    "a view of another": (lambda x, y, *, run: (y[:], x + y), "seen: is a view of x and must lie in it: got memory"),
    "a view too much": (
        lambda x, y, *, run: (x[:], y[:]),
        "sum: must have memory of its own: got a view of an operand",
    ),
    "strides": (lambda x, y, *, run: (x.view(2, 6).t(), x + y), r"seen: must be contiguous: got strides \(1, 6\)"),
}


@pytest.mark.parametrize("seed", [None, 3], ids=["plain", "hostile"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_rule_that_gives_other_views_than_its_op(kind, seed):
    rule, message = WRONG[kind]
    program = scheduled(lambda x, y: bind(Both(), x, y), x=X, y=X)
    with pytest.raises(RunError, match=message) as caught:
        ran(program, [counted()], [counted()], seed=seed, rules={Both: rule})
    assert isinstance(caught.value.error, ContractError)


@frozen
class Two(Both):
    """`x`, `y` [T, D] -> two results of their own."""

    views: ClassVar = {}


@pytest.mark.parametrize("seed", [None, 3], ids=["plain", "hostile"])
def test_two_results_in_one_memory_are_refused(seed):
    program = scheduled(lambda x, y: bind(Two(), x, y), x=X, y=X)

    def twice(x: torch.Tensor, y: torch.Tensor, *, run: Any) -> tuple[torch.Tensor, ...]:
        made = torch.cat([x, y])
        return made[:6], made[5:11]

    with pytest.raises(RunError, match="sum: must have memory of its own: got memory that seen lies in too"):
        ran(program, [counted()], [counted()], seed=seed, rules={Two: twice})
    beside = lambda x, y, *, run: tuple(torch.cat([x, y]).split(6))  # noqa: E731
    assert ran(program, [counted()], [counted(20)], seed=seed, rules={Two: beside})[1][0][0].tolist() == [20.0, 21.0]


def test_a_drop_lets_go_of_memory_under_all_its_names():
    """Of what is made, viewed, and written through the view, nothing is alive when the last op runs."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def following(x: torch.Tensor, *, run: Any) -> tuple[torch.Tensor]:
        alive.append(sum(ref() is not None for ref in made))
        out = x + 1
        made.append(weakref.ref(out.untyped_storage()))
        return (out,)

    def step(x):
        (memory,) = bind(Next(), x)
        (part,) = bind(Rows(0, 6), memory)
        (state,) = bind(Doubled(), part)
        return bind(Next(), bind(Next(), bind(Next(), state)[0])[0])

    run = Backend("views", RULES | {Next: following}).compile(scheduled(step, x=X))
    for _ in range(2):  # the first run looks at what the rules give
        run([counted()])
        assert alive == [0, 1, 1, 1]
        made.clear()
        alive.clear()
