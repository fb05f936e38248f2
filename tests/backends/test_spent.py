"""A sum over ranks is made in the memory of its operand where nobody else ever sees that; nowhere else."""

from collections.abc import Sequence

import pytest
import torch
from attrs import field, frozen

from mla_fx import Layout
from mla_fx.backends import Backend, InProcess, cpu
from mla_fx.effects import MAIN, Aval, Group, Orchestration, Program, bind, ops, schedule, trace

X = Aval((4, 8), "fp32")


@frozen
class Noting:
    """One rank, whose transport adds in place where it may, and notes whether it might."""

    layout: Layout = field(factory=Layout)
    here: range = range(1)
    peers: None = None
    asked: list[bool] = field(factory=list)

    def move(self, how: str, sent: Sequence[torch.Tensor], *, group: str, spent: bool = False) -> list[torch.Tensor]:
        self.asked.append(spent)
        return [sent[0].mul_(2)] if spent else [sent[0] * 2]


def program(how: str) -> Program:
    def function(x, y):
        (part,) = bind(ops.Add(), x, y, names=("part",))
        more = bind(ops.Add(), part, y, names=("more",)) if how == "taken before" else ()
        (total,) = bind(ops.AllReduce(Group("tp", 1)), x if how == "an input" else part, names=("total",))
        if how == "taken behind":
            more = bind(ops.Add(), part, total, names=("more",))
        if how == "taken aside":
            more = bind(ops.Add(), part, y, names=("aside",))
        return (total, part) if how == "an output" else (total, *more)

    stream = {"made aside": "part", "summed aside": "total", "taken aside": "aside"}.get(how)
    aside = Orchestration("some", lambda e: "side" if e.results == (stream,) else MAIN)
    return schedule(trace(function, how, x=X, y=X), aside)


def found(how: str) -> tuple[list[bool], list[torch.Tensor]]:
    world = Noting()
    run = Backend("cpu", cpu.TABLE, world).compile(program(how))
    results = run([torch.ones(4, 8)], [torch.full((4, 8), 2.0)])
    return world.asked, [of_rank[0] for of_rank in results]


def test_in_place_where_nobody_else_takes_it():
    asked, (total,) = found("")
    assert asked == [True] and torch.equal(total, torch.full((4, 8), 6.0))


LEFT = {
    "an input": [2.0],
    "an output": [6.0, 3.0],
    "taken before": [6.0, 5.0],
    "taken behind": [6.0, 9.0],
    "taken aside": [6.0, 5.0],
    "made aside": [6.0],
    "summed aside": [6.0],
}


@pytest.mark.parametrize("how", LEFT)
def test_left_alone(how):
    """Where somebody takes it too, whenever and wherever, or where its memory is another stream's."""
    asked, results = found(how)
    assert asked == [False]
    assert [result[0, 0].item() for result in results] == LEFT[how]


def test_all_ranks_of_a_process_do_without():
    """There the sum is wide, in memory of its own."""
    sent = [torch.ones(3, dtype=torch.bfloat16) for _ in range(2)]
    first, second = InProcess(2).move("all_reduce", sent, group="tp", spent=True)
    assert first.tolist() == second.tolist() == [2, 2, 2] and sent[0].tolist() == [1, 1, 1]
