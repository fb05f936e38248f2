"""Views over the wheel's own allocator: what a view is of stays until the view is not used any more."""

import pytest
import torch
from attrs import evolve

from mla_fx.backends import Backend, InProcess, RunError, device
from mla_fx.effects import Aval, Keep, Program, bind, check, schedule, trace
from tests.backends.test_views import RULES, Next, Rows

X = Aval((128, 8), "fp32")  # of a size that the allocator hands on to what is made next


def program(aside: str) -> Program:
    """Main makes memory and lets go of it; another stream reads a view of it, beside what main goes on with."""

    def lent(x):
        (memory,) = bind(Next(), x, names=("memory",))
        (part,) = bind(Rows(0, 128), memory)
        (read,) = bind(Next(), part, names=("read",))
        return read, *bind(Next(), *bind(Next(), x))

    return schedule(trace(lent, x=X), lambda equation: aside if equation.results == ("read",) else "main")


def backend(rules=RULES) -> Backend:
    return Backend("views", rules, InProcess(1), device("npu"))


def right(emulator, described: Program, seed: int) -> bool:
    emulator.seed(seed)
    run = backend().compile(described, unchecked=True)
    x = torch.arange(1024.0).view(128, 8).npu()
    (read,), (last,) = run([x])
    found = read.cpu(), last.cpu()
    return all(torch.equal(one, x.cpu() + 2) for one in found)


def test_memory_that_a_view_shows_is_kept(emulator):
    described = program("side")
    check(described)
    assert [effect for effect in described if isinstance(effect, Keep)] == [Keep("memory", "side")]
    assert all(right(emulator, described, seed) for seed in range(20))
    less = evolve(described, effects=tuple(e for e in described if not isinstance(e, Keep)))
    assert not all(right(emulator, less, seed) for seed in range(60))


def test_a_view_that_is_not_declared_is_refused_in_the_first_run(emulator):
    run = backend(RULES | {Next: lambda x, *, run: (x[:],)}).compile(program("main"))
    with pytest.raises(RunError, match="out: must have memory of its own: got a view of an operand"):
        run([torch.zeros(128, 8).npu()])
