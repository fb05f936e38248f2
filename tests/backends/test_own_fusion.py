"""A user's own pattern: two ops that the library does not know, fused without touching it."""

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch
from attrs import frozen

from mla_fx import backends, orchestrations
from mla_fx.backends import Fusion, ascend
from mla_fx.backends.ascend import fused
from mla_fx.effects import Aval, Equation, Found, Op, Step, Value, bind, check, rewrite, schedule, trace
from tests.setups import Setup


@frozen
class Scale(Op):
    """`x` [T, D], `by` [D] -> [T, D]."""

    operands: ClassVar = {"x": "T D", "by": "D"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        return (Aval((axes["T"], axes["D"]), dtype),)


@frozen
class Shift(Scale):
    """The same, added."""


@frozen
class ScaleShift(Op):
    """Both, as one."""

    operands: ClassVar = {"x": "T D", "by": "D", "of": "D"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        return (Aval((axes["T"], axes["D"]), dtype),)

    def definition(self, *operands: Value) -> tuple[Value, ...]:
        x, by, of = operands
        return bind(Shift(), *bind(Scale(), x, by), of)


def find(step: Step) -> Step:
    maker = {equation.results[0]: equation for equation in step.equations}

    def match(step: Step, equation: Equation) -> Found | None:
        scaled = maker.get(equation.operands[0])
        if not isinstance(equation.op, Shift) or scaled is None or type(scaled.op) is not Scale:
            return None
        operands = (*scaled.operands, equation.operands[1])
        return Found((scaled, equation), Equation(ScaleShift(), operands, equation.results, equation.tag))

    return rewrite(step, match)


CALLED: list[str] = []


def together(x, by, of, *, run):
    CALLED.append("together")
    return (torch.addcmul(of, x, by),)


OWN = {Scale: lambda x, by, *, run: (x * by,), Shift: lambda x, by, *, run: (x + by,)}
FUSION = Fusion(ScaleShift, together, lambda op, *avals: None, find)
X, D = Aval((3, 8), "fp32"), Aval((8,), "fp32")


def block(x, by, of):
    return bind(Shift(), *bind(Scale(), x, by), of)


STEP = trace(block, "block", x=X, by=D, of=D)


def ran(backend: backends.Backend) -> tuple[Step, torch.Tensor]:
    step = backend.lower(STEP)
    program = schedule(step, orchestrations.serial)
    check(program)
    given = (torch.arange(24.0).view(3, 8), torch.arange(8.0), torch.full((8,), 0.5))
    ((out,),) = backend.compile(program)(*([x] for x in backend.put(given)))
    return step, out


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_it_is_found_and_runs_by_its_own_rule(name):
    apart = backends.get(name).with_rules(OWN)
    CALLED.clear()
    step, expected = ran(apart)
    assert [type(e.op) for e in step.equations] == [Scale, Shift] and not CALLED
    fused_step, got = ran(apart.with_fusions(FUSION))
    assert [type(e.op) for e in fused_step.equations] == [ScaleShift]
    assert CALLED == ["together"] and torch.equal(got, expected)
    CALLED.clear()
    again, got = ran(apart.with_fusions(FUSION).without_fusions(FUSION))
    assert again == STEP and torch.equal(got, expected) and not CALLED


def test_a_backend_without_it_runs_the_fused_step_by_its_parts():
    CALLED.clear()
    hostile = backends.get("cpu", adversary=3).with_rules(OWN)
    run = hostile.compile(schedule(find(STEP), orchestrations.serial))
    ((out,),) = run([torch.ones(3, 8)], [torch.full((8,), 2.0)], [torch.ones(8)])
    assert not CALLED and torch.equal(out, torch.full((3, 8), 3.0))


def test_those_of_a_backend_can_be_read_and_switched_off_one_by_one():
    step = Setup(layers=2, dtype="bf16").step
    for off in fused.ALL:
        table = ascend.TABLE.without_fusions(off)
        assert len(table.passes) == len(ascend.TABLE.passes) - 1 and off.op in table.rules
        lowered = step
        for one in table.passes:
            lowered = one(lowered)
        assert not any(isinstance(equation.op, off.op) for equation in lowered.equations)
    assert ascend.TABLE.without_fusions(*fused.ALL).passes == ()
