"""`ops.Prefetch`: an effect without a result."""

import pytest
import torch
from attrs import evolve

from mla_fx.backends import cpu
from mla_fx.effects import (
    MAIN,
    Aval,
    Keep,
    Launch,
    Orchestration,
    ScheduleError,
    Wait,
    bind,
    check,
    ops,
    parameters,
    schedule,
    trace,
    violations,
)
from mla_fx.projections import linear, prefetch
from tests.cases import each
from tests.ops.conftest import Rules


@each("kind", ["int8", "fp32"])
def test_nothing_comes_of_it(rules, rng, kind):
    """Any weight, behind any value; both stay as they are."""
    weight = torch.arange(6).view(2, 3).to({"int8": torch.int8, "fp32": torch.float32}[kind])
    after = rules.random(rng, 2, 3, 4)
    before = weight.clone(), after.clone()
    assert rules(ops.Prefetch(), weight, after) == ()
    assert torch.equal(weight, before[0]) and torch.equal(after, before[1])


def test_shapes():
    """Whatever the weight and what it follows are; two operands they must be."""
    assert ops.Prefetch().infer(Aval((4, 5), "int8"), Aval((2, 3, 4), "bf16")) == ()
    with pytest.raises(ValueError, match=r"prefetch takes 2 operands \(weight, after\): got 1"):
        ops.Prefetch().infer(Aval((4, 5), "int8"))


def fetched():
    """A product with a weight that is fetched beside an earlier one."""

    def compute(x, first, second):
        prefetch(second, x)
        return linear(linear(x, first), second)

    weight = Aval((4, 4), "bf16")
    return trace(compute, x=Aval((2, 4), "bf16"), first=parameters(weight), second=parameters(weight))


def test_it_is_no_dead_code():
    step = fetched()
    assert [type(equation.op) for equation in step.equations] == [ops.Prefetch, ops.Linear, ops.Linear]
    assert "\n    prefetch second x\n" in str(step)
    program = schedule(step, Orchestration("serial"))
    check(program)
    assert "main  prefetch second x\n" in str(program)


def test_nobody_waits_for_it_but_the_end():
    """It follows what it is behind, and no reader of the weight follows it."""
    aside = Orchestration("aside", lambda e: "side" if isinstance(e.op, ops.Prefetch) else MAIN, streams=("side",))
    program = schedule(fetched(), aside)
    check(program)
    last = max(k for k, effect in enumerate(program) if isinstance(effect, Launch))
    assert [(k > last, e.stream) for k, e in enumerate(program) if isinstance(e, Wait)] == [
        (False, "side"),
        (True, MAIN),
    ]


def test_twice_the_same_is_twice():
    """Equations without results may be equal; an order that keeps one of two is refused, one that keeps both is not."""

    def compute(x, w):
        for _ in range(2):
            bind(ops.Prefetch(), w, x)
        return linear(x, w)

    weight = Aval((4, 4), "bf16")
    step = trace(compute, x=Aval((2, 4), "bf16"), w=parameters(weight))
    assert len(step.equations) == len(schedule(step, Orchestration("serial")).launches) == 3
    for order, fits in ((lambda s: s.equations[::-1], True), (lambda s: s.equations[1:], False)):
        given = Orchestration("mine", order=lambda s, order=order: evolve(s, equations=order(s)))
        if fits:
            check(schedule(step, given))
        else:
            with pytest.raises(ScheduleError, match="its order must permute the equations"):
                schedule(step, given)


def test_what_it_follows_is_kept_for_it():
    """It reads nothing, and is held by the law like every launch: its operands outlive it."""

    def compute(x, w):
        behind = linear(x, w)
        prefetch(w, behind)
        return linear(linear(behind, w), w)

    weight = Aval((4, 4), "bf16")
    step = trace(compute, x=Aval((2, 4), "bf16"), w=parameters(weight))
    program = schedule(step, lambda e: "side" if isinstance(e.op, ops.Prefetch) else MAIN)
    (keep,) = (k for k, effect in enumerate(program) if isinstance(effect, Keep))
    (found,) = violations(program.without(keep))
    assert found.rule == 3 and "prefetch (w) on side uses" in found.message


def test_the_rule_of_cpu_reads_nothing():
    assert Rules(cpu.TABLE, torch.float32)(ops.Prefetch(), torch.empty(0), torch.empty(0)) == ()
