"""What the scheduler derives: listings of the three orchestrations, minimality, lifetimes, and what it refuses."""

from pathlib import Path

import pytest
from attrs import evolve

from mla_fx import MlaConfig, StepShape, attention_step, orchestrations
from mla_fx.effects import (
    MAIN,
    Call,
    Drop,
    Keep,
    Launch,
    Record,
    ScheduleError,
    Step,
    Wait,
    arg,
    bind,
    check,
    ops,
    schedule,
)
from mla_fx.models import deepseek_v3_config, model_step
from tests.effects.toys import One, Scratch, Two, Update

GOLDEN = Path(__file__).parent / "golden"
CONFIG = MlaConfig.deepseek_v3()
SHAPE = StepShape(ranks=8, tokens=4, requests=4)


@pytest.mark.parametrize("name", orchestrations.NAMED)
def test_listing(name):
    program = schedule(attention_step(CONFIG, SHAPE), orchestrations.NAMED[name])
    check(program)
    assert str(program) + "\n" == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("layers", [1, 61])
def test_how_much_attention_aside_keeps(layers):
    """The figures in the README: minimal keeps nothing, conservative six tensors a layer, as code by hand does."""
    step = model_step(evolve(deepseek_v3_config(), num_hidden_layers=layers), SHAPE)
    minimal = schedule(step, orchestrations.attention_aside)
    conservative = schedule(step, orchestrations.attention_aside, mode="conservative")
    check(minimal)
    check(conservative)
    assert (minimal.count(Keep), conservative.count(Keep)) == (0, 6 * layers)
    assert minimal.count(Record) == minimal.count(Wait) == 2 * layers


def test_all_results_of_a_step_do_not_depend_on_the_orchestration():
    """Same launches, same operands; only streams and effects between them differ."""
    step = attention_step(CONFIG, SHAPE)
    plain = {(e.op, e.operands, e.results) for e in schedule(step, orchestrations.serial).launches}
    for placement in orchestrations.NAMED.values():
        assert {(e.op, e.operands, e.results) for e in schedule(step, placement).launches} == plain


def test_an_orchestration_of_ones_own():
    def projections_aside(call: Call) -> str:
        if isinstance(call.op, ops.CurrentAttention):
            return "side"
        return "keys" if any(value.name == "kv" for value in call.operands) else MAIN

    program = schedule(attention_step(CONFIG, SHAPE), projections_aside)
    check(program)
    assert program.streams == ("main", "keys", "side")
    assert program.orchestration == "projections-aside"


def step_of(*outputs, inputs):
    return Step("toy", {value.name: value for value in inputs}, outputs)


def on(**table):
    return lambda call: table.get(f"s{call.op.salt}", MAIN)


def test_memory_without_later_order_is_kept():
    """a is used on side, and main goes on with launches that nothing orders behind that use."""
    x = arg("x", (2,), "fp64")
    (a,) = bind(One(1), x)
    (b,) = bind(One(3), a)
    (c,) = bind(One(5), x)
    program = schedule(step_of(b, c, inputs=[x]), on(s3="side"))
    check(program)
    at = program.effects.index(Keep("out", "side"))
    assert program.effects[at + 1] == Drop("out")


def test_memory_is_let_go_behind_the_wait_that_covers_its_uses():
    """The launch after the wait is ordered behind the use, so nothing has to be kept."""
    x = arg("x", (2,), "fp64")
    (a,) = bind(One(1), x)
    (b,) = bind(One(3), a)
    (c,) = bind(One(5), x)
    (d,) = bind(Two(7), b, c)
    program = schedule(step_of(d, inputs=[x]), on(s3="side"))
    check(program)
    assert program.count(Keep) == 0
    kinds = [type(effect).__name__ for effect in program.effects]
    assert kinds[kinds.index("Wait", kinds.index("Wait") + 1) + 1 :][:2] == ["Drop", "Launch"]


def test_one_event_serves_several_waits():
    x = arg("x", (2,), "fp64")
    (a,) = bind(One(1), x)
    outs = [bind(One(s), a)[0] for s in (3, 5)]
    program = schedule(step_of(*outs, inputs=[x]), on(s3="side", s5="comm"))
    check(program)
    assert [program.count(kind) for kind in (Record, Wait)] == [3, 4]


def test_readers_go_before_the_writer_that_replaces_what_they_read():
    state, x = arg("state", (2,), "fp64"), arg("x", (2,), "fp64")
    (newer,) = bind(Update(1), state, x)
    (seen,) = bind(One(3), state)  # written later, reads the version before
    program = schedule(step_of(newer, seen, inputs=[state, x]), on(s3="side"))
    check(program)
    assert [launch.op.salt for launch in program.launches] == [3, 1]


def test_workspace_users_keep_the_order_of_writing():
    x = arg("x", (2,), "fp64")
    outs = [bind(Scratch(s), x)[0] for s in (1, 3)]
    program = schedule(step_of(*outs, inputs=[x]), on(s3="side"))
    check(program)
    waits = [effect for effect in program.effects if isinstance(effect, Wait)]
    assert [(wait.stream, wait.why) for wait in waits] == [("side", "workspace"), ("main", "out_1")]


def test_refusals():
    state, x = arg("state", (2,), "fp64"), arg("x", (2,), "fp64")
    (one,) = bind(Update(1), state, x)
    (two,) = bind(Update(3), state, x)
    with pytest.raises(ScheduleError, match="a version of a state is written once"):
        schedule(step_of(one, two, inputs=[state, x]), on())
    (late,) = bind(Two(5), state, one)
    with pytest.raises(ScheduleError, match="an old version of a state is read after it was replaced"):
        schedule(step_of(late, inputs=[state, x]), on())
    with pytest.raises(ScheduleError, match="output state is a version of a state that update"):
        schedule(step_of(one, state, inputs=[state, x]), on())
    with pytest.raises(ScheduleError, match="x, an operand of one\\(x\\), is not among the arguments"):
        schedule(step_of(bind(One(1), x)[0], inputs=[state]), on())
    with pytest.raises(ScheduleError, match=r"a placement must give the name of a stream .*: got 7"):
        schedule(step_of(one, inputs=[state, x]), lambda call: 7)
    with pytest.raises(ScheduleError, match="mode must be 'minimal' or 'conservative': got 'tiny'"):
        schedule(step_of(one, inputs=[state, x]), on(), mode="tiny")


def test_dead_code_is_not_issued():
    x = arg("x", (2,), "fp64")
    (used,) = bind(One(1), x)
    bind(One(3), x)
    assert [type(e) for e in schedule(step_of(used, inputs=[x]), on()).effects] == [Launch]
