"""An orchestration is one value: which stream, in which order; what it may not be is refused."""

import pickle
from collections import Counter

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from mla_fx import MlaConfig, StepShape, attention_step, orchestrations
from mla_fx.effects import (
    MAIN,
    Equation,
    Launch,
    Orchestration,
    ScheduleError,
    Step,
    Wait,
    bind,
    check,
    ops,
    schedule,
)
from mla_fx.effects.orchestration import orchestration
from tests.effects import toys
from tests.effects.test_schedule import quick, settings
from tests.effects.toys import Exchange, One, Scratch, Two, Update, placed, put, step_of


def test_a_function_from_equation_to_stream_is_one():
    def keys_aside(equation: Equation) -> str:
        return "keys"

    made = orchestration(keys_aside)
    assert (made.name, made.streams) == ("keys-aside", ())
    assert orchestration(made) is made
    assert orchestration(lambda equation: MAIN).name == "<lambda>"

    class Aside:
        def __call__(self, equation: Equation) -> str:
            return MAIN

    assert orchestration(Aside()).name == "Aside"


def test_it_compares_by_value_and_pickles():
    for one in orchestrations.NAMED.values():
        assert pickle.loads(pickle.dumps(one)) == one
        assert evolve(one, streams=(*one.streams, "other")) != one
    assert len({*orchestrations.NAMED.values()}) == len(orchestrations.NAMED)


@pytest.mark.parametrize("name", [7, None, "", "two words", "1st", "a-b"])
def test_a_stream_has_a_name(name):
    with pytest.raises(
        ScheduleError, match=r"must give the name of a stream \(an identifier\): got .* for 'out = one x"
    ):
        schedule(step_of(lambda x: bind(One(1), x)), lambda equation: name)


def test_declared_streams_that_stay_empty_are_refused():
    """A name that an orchestration looks for is another in this step: better said than run serially."""
    lost = Orchestration("lost", lambda equation: MAIN, streams=("side", "comm", MAIN))
    with pytest.raises(
        ScheduleError,
        match="lost: each of its streams must be given an equation of toy: got none on side, c",
    ):
        schedule(step_of(lambda x: bind(One(1), x)), lost)
    aside = orchestrations.attention_aside
    without = step_of(lambda x: bind(One(1), x))
    with pytest.raises(ScheduleError, match=r"orchestration attention-aside: .* got none on side"):
        schedule(without, aside)


def backwards(step: Step) -> Step:
    """Each equation as late as what needs it allows, that is the last first where nothing needs anything."""
    left, known, done = list(step.equations), {one.name for one in step.inputs}, []
    while left:
        last = max(k for k, e in enumerate(left) if known.issuperset(e.operands))
        done.append(left.pop(last))
        known.update(done[-1].results)
    return evolve(step, equations=tuple(done))


def salts(program):
    return [launch.op.salt for launch in program.launches]


def test_the_order_is_that_of_issue():
    step = step_of(lambda x: [bind(op(s), x)[0] for op, s in ((One, 1), (Scratch, 3), (Scratch, 5), (Exchange, 7))])
    program = schedule(step, Orchestration("backwards", order=backwards))
    assert salts(program) == [7, 5, 3, 1]
    assert salts(schedule(step, Orchestration("as-written"))) == [1, 3, 5, 7]


def test_workspaces_and_collectives_follow_the_order_of_issue():
    """Which user of a workspace, or which collective, goes first is for the order to say; that one does stays law."""

    def compute(x):
        return [bind(op(s), x)[0] for op, s in ((Scratch, 1), (Exchange, 3), (Scratch, 5), (Exchange, 7))]

    streams = placed({5: "side", 7: "comm"})
    program = schedule(step_of(compute), Orchestration("backwards", streams, order=backwards))
    check(program)
    assert salts(program) == [7, 5, 3, 1]
    waits = [(e.stream, e.why) for e in program if isinstance(e, Wait)]
    assert waits == [("comm", "x"), ("side", "x"), (MAIN, "collectives"), (MAIN, "workspace")]


def test_a_reader_goes_before_the_writer_whatever_the_order():
    def compute(state, x):
        (seen,) = bind(One(1), state)
        (newer,) = bind(Update(3), state, x)
        return newer, seen

    program = schedule(step_of(compute), Orchestration("backwards", order=backwards))
    check(program)
    assert salts(program) == [1, 3]


def swapped(step: Step) -> Step:
    return evolve(step, equations=step.equations[::-1])


def dropped(step: Step) -> Step:
    return evolve(step, equations=step.equations[:1], outputs=("out",))


def renamed(step: Step) -> Step:
    return evolve(step, name="other")


def replaced(step: Step) -> Step:
    first, *others = step.equations
    return evolve(step, equations=(evolve(first, op=One(9)), *others))


@pytest.mark.parametrize("order", [dropped, renamed, replaced, lambda step: None])
def test_an_order_does_no_more_than_permute(order):
    step = step_of(lambda x: bind(Two(3), bind(One(1), x)[0], x))
    with pytest.raises(ScheduleError, match="orchestration bad: its order must permute the equations of toy only"):
        schedule(step, Orchestration("bad", order=order))


def test_an_order_may_not_put_a_reader_before_what_it_reads():
    step = step_of(lambda x: bind(Two(3), bind(One(1), x)[0], x))
    with pytest.raises(ScheduleError, match="orchestration bad: its order must leave toy a step: 'out_1 = two out x'"):
        schedule(step, Orchestration("bad", order=swapped))


def test_passes_come_first_one_after_the_other():
    """What is scheduled is the step behind them, and the order permutes that."""

    def salted(more):
        def one(step: Step) -> Step:
            return evolve(step, equations=tuple(evolve(e, op=One(10 * e.op.salt + more)) for e in step.equations))

        return one

    step = step_of(lambda x: [bind(One(s), x)[0] for s in (1, 2)])
    program = schedule(step, Orchestration("passed", order=backwards, passes=(salted(3), salted(4))))
    assert salts(program) == [234, 134]
    with pytest.raises(ScheduleError, match="orchestration lost: each of its passes must give a step: got None"):
        schedule(step, Orchestration("lost", passes=(lambda step: None,)))


@st.composite
def orders(draw):
    """A random permutation that operands allow."""
    priorities = draw(st.lists(st.integers(0, 99), min_size=12, max_size=12))

    def order(step: Step) -> Step:
        left, known, done = list(step.equations), {one.name for one in step.inputs}, []
        while left:
            ready = [e for e in left if known.issuperset(e.operands)]
            done.append(min(ready, key=lambda e: priorities[e.op.salt % 12]))
            left.remove(done[-1])
            known.update(done[-1].results)
        return evolve(step, equations=tuple(done))

    return order


@settings(quick, max_examples=25)
@given(toys.steps(kinds=tuple(kind for kind in toys.KINDS if kind is not Update)), toys.orchestrations(), orders())
def test_any_order_is_followed_and_gives_the_serial_result(step, streams, order):
    """Without states nothing but operands stands in the way of an order."""
    program = schedule(step, Orchestration("random", streams, order=order))
    check(program)
    assert [launch.results for launch in program.launches] == [e.results for e in order(step).equations]
    expected = toys.run(schedule(step, Orchestration("serial")))
    toys.right(program, expected, (None, 1, 2))


def followed_around_states(step, streams, order):
    program = schedule(step, Orchestration("random", streams, order=order))
    check(program)
    assert Counter(launch.results for launch in program.launches) == Counter(e.results for e in step.equations)
    expected = toys.run(schedule(step, Orchestration("serial")))
    toys.right(program, expected, (None, 1, 2, 3))


@settings(quick, max_examples=25)
@given(toys.steps(), toys.orchestrations(), orders())
def test_any_order_around_states_gives_the_serial_result(step, streams, order):
    followed_around_states(step, streams, order)


@pytest.mark.soak
@settings(quick, derandomize=False, max_examples=2000)
@given(toys.steps(), toys.orchestrations(), orders())
def test_many_orders_give_the_serial_result(step, streams, order):
    followed_around_states(step, streams, order)


def test_scopes_say_where():
    """Streams by scope: what was written under "keys" goes aside, at any depth."""
    step = attention_step(MlaConfig.deepseek_v3(), StepShape(ranks=8, tokens=4, requests=4))
    aside = Orchestration("keys-aside", lambda e: "keys" if e.within("keys") else MAIN, streams=("keys",))
    program = schedule(step, aside)
    check(program)
    there = [e for e in program if isinstance(e, Launch) and e.stream == "keys"]
    assert [type(launch.op) for launch in there] == [ops.Linear, ops.RmsNorm, ops.Rope, ops.WriteRows, ops.WriteRows]
    assert {launch.tag for launch in there} == {"attention.keys"}


def test_the_listing_names_the_orchestration():
    program = schedule(Step("toy", (put("x"),), (), ("x",)), Orchestration("named"))
    assert str(program) == "toy    orchestration named\nmain  return x"
