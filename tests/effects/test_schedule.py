"""What the scheduler derives: listings of the three orchestrations, minimality, lifetimes, and what it refuses."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings

from mla_fx import MlaConfig, StepShape, attention_step, orchestrations
from mla_fx.effects import (
    MAIN,
    Drop,
    Effect,
    Equation,
    Keep,
    Launch,
    Program,
    Record,
    ScheduleError,
    Stage,
    Step,
    Wait,
    bind,
    check,
    on_host,
    ops,
    schedule,
    staged,
    trace,
    violations,
)
from mla_fx.models import deepseek_v3_config, model_step
from tests.effects import toys
from tests.effects.toys import One, Scratch, Two, Update, X, placed, put, step_of
from tests.setups import ANYWHERE

GOLDEN = Path(__file__).parent / "golden"
CONFIG = MlaConfig.deepseek_v3()
SHAPE = StepShape(ranks=8, tokens=4, requests=4)


def step_for(name):
    """The attention of DeepSeek-V3; of an orchestration that places experts, two of its layers that have some."""
    shape = evolve(SHAPE, split=orchestrations.NAMED[name].split)
    if name in ("shared-experts-aside", "dual-batch"):
        return model_step(evolve(deepseek_v3_config(), num_hidden_layers=2, first_k_dense_replace=0), shape)
    return attention_step(CONFIG, shape)


@pytest.mark.parametrize("name", orchestrations.NAMED)
def test_listing(name):
    program = schedule(step_for(name), orchestrations.NAMED[name])
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
    plain = {(e.op, e.operands, e.results) for e in step.equations}
    for named in map(orchestrations.NAMED.get, ANYWHERE):
        assert {(e.op, e.operands, e.results) for e in schedule(step, named).launches} == plain


def test_an_orchestration_of_ones_own():
    def projections_aside(equation: Equation) -> str:
        if isinstance(equation.op, ops.CurrentAttention):
            return "side"
        return "keys" if equation.within("keys") else MAIN

    program = schedule(attention_step(CONFIG, SHAPE), projections_aside)
    check(program)
    assert program.streams == ("main", "keys", "side")
    assert program.orchestration == "projections-aside"
    assert program.launches[0].tag == "" and program.launches[1].tag == "attention.query"


SIDE = placed({3: "side"})


def test_memory_without_later_order_is_kept():
    """a is used on side, and main goes on with launches that nothing orders behind that use."""

    def compute(x):
        (a,) = bind(One(1), x)
        (b,) = bind(One(3), a)
        (c,) = bind(One(5), x)
        return b, c

    program = schedule(step_of(compute), SIDE)
    check(program)
    at = program.effects.index(Keep("out", "side"))
    assert program.effects[at + 1] == Drop("out")


def test_memory_is_let_go_behind_the_wait_that_covers_its_uses():
    """The launch after the wait is ordered behind the use, so nothing has to be kept."""

    def compute(x):
        (a,) = bind(One(1), x)
        (b,) = bind(One(3), a)
        (c,) = bind(One(5), x)
        return bind(Two(7), b, c)

    program = schedule(step_of(compute), SIDE)
    check(program)
    assert program.count(Keep) == 0
    kinds = [type(effect).__name__ for effect in program.effects]
    assert kinds[kinds.index("Wait", kinds.index("Wait") + 1) + 1 :][:2] == ["Drop", "Launch"]


def test_the_last_of_a_chain_of_streams_keeps_for_all():
    """a is used on side, then on comm, which waits for side: comm alone keeps it."""

    def compute(x):
        (a,) = bind(One(1), x)
        (b,) = bind(One(3), a)
        (c,) = bind(Two(5), a, b)
        (d,) = bind(One(7), x)
        return c, d

    program = schedule(step_of(compute), placed({3: "side", 5: "comm"}))
    check(program)
    assert [effect for effect in program if isinstance(effect, Keep)] == [Keep("out", "comm")]


def test_one_event_serves_several_waits():
    def compute(x):
        (a,) = bind(One(1), x)
        return [bind(One(s), a)[0] for s in (3, 5)]

    program = schedule(step_of(compute), placed({3: "side", 5: "comm"}))
    check(program)
    assert [program.count(kind) for kind in (Record, Wait)] == [3, 4]


def test_readers_go_before_the_writer_that_replaces_what_they_read():
    def compute(state, x):
        (newer,) = bind(Update(1), state, x)
        (seen,) = bind(One(3), state)  # written later, reads the version before
        return newer, seen

    program = schedule(step_of(compute), SIDE)
    check(program)
    assert [launch.op.salt for launch in program.launches] == [3, 1]


def test_workspace_users_keep_the_order_of_writing():
    program = schedule(step_of(lambda x: [bind(Scratch(s), x)[0] for s in (1, 3)]), SIDE)
    check(program)
    waits = [effect for effect in program.effects if isinstance(effect, Wait)]
    assert [(wait.stream, wait.why) for wait in waits] == [("side", "workspace"), ("main", "out_1")]


def test_staged_inputs_are_sent_first():
    def compute(x, table, lengths):
        (a,) = bind(Two(3), x, table)
        return bind(One(1), x)[0], a

    step = trace(compute, x=X, table=staged(X), lengths=on_host(X))
    program = schedule(step, SIDE)
    check(program)
    assert program.effects[:3] == (Stage(("table",)), Record(MAIN, "e0"), Wait("side", "e0"))


def test_what_no_output_needs_is_issued_where_a_step_has_it():
    """`trace` leaves dead code out; a step that is written down with it gets it, and its stream joins."""
    equations = (Equation(One(1), ("x",), ("a",)), Equation(One(3), ("x",), ("b",)))
    program = schedule(Step("idle", (put("x"),), equations, ("a",)), SIDE)
    check(program)
    assert len(program.launches) == 2
    assert program.effects[-1] == Wait(MAIN, "e1")
    assert program.effects[-1].why == "end"


def test_programs_of_nothing():
    nothing = Step("nothing", (), (), ())
    check(schedule(nothing, orchestrations.serial))
    assert schedule(nothing, orchestrations.serial).effects == ()
    through = Step("through", (put("x"),), (), ("x",))
    assert schedule(through, orchestrations.serial).outputs == ("x",)
    silent = schedule(Step("silent", (put("x"),), (Equation(One(3), ("x",), ("a",)),), ()), SIDE)
    check(silent)
    for program in (schedule(nothing, orchestrations.serial), schedule(through, orchestrations.serial), silent):
        assert toys.run(program) == toys.run(program, seed=3)


def by_hand(*equations, outputs, inputs=("state", "x")):
    return Step("toy", tuple(map(put, inputs)), tuple(Equation(*e) for e in equations), outputs)


def test_refusals():
    one, two = (Update(1), ("state", "x"), ("one",)), (Update(3), ("state", "x"), ("two",))
    with pytest.raises(ScheduleError, match="a version of a state is written once"):
        schedule(by_hand(one, two, outputs=("one", "two")), SIDE)
    late = (Two(5), ("state", "one"), ("late",))
    with pytest.raises(ScheduleError, match="an old version of a state is read after it was replaced"):
        schedule(by_hand(one, late, outputs=("late",)), SIDE)
    with pytest.raises(ScheduleError, match="output state is a version of a state that 'one = update state x'"):
        schedule(by_hand(one, outputs=("one", "state")), SIDE)
    both = (Update(1), ("state", "state"), ("one",))
    with pytest.raises(ScheduleError, match="state: a state must be one operand of what writes it: got 'one = update"):
        schedule(by_hand(both, outputs=("one",)), SIDE)
    with pytest.raises(ScheduleError, match="mode must be 'minimal' or 'conservative': got 'tiny'"):
        schedule(by_hand(one, outputs=("one",)), SIDE, mode="tiny")


# --- what the minimal mode minimises ---------------------------------------------

quick = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def without_lifetimes(program: Program) -> list[Effect]:
    return [effect for effect in program if not isinstance(effect, Keep | Drop)]


def with_lifetime(effects: list[Effect], value: str, at: int, keeps: tuple[str, ...]) -> list[Effect]:
    return [*effects[:at], *(Keep(value, stream) for stream in keeps), Drop(value), *effects[at:]]


def legal(program: Program, effects: list[Effect]) -> bool:
    return not violations(evolve(program, effects=tuple(effects)))


def lifetime(program: Program, value: str) -> tuple[int, int, int]:
    """Of the program's own: how many launches of the value's home stream come before its drop, and how many keeps."""
    home = program.home()[value]
    at = program.effects.index(Drop(value))
    launches = [k for k, e in enumerate(program) if isinstance(e, Launch) and e.stream == home]
    keeps = sum(isinstance(e, Keep) and e.value == value for e in program)
    return sum(k < at for k in launches), len(launches), keeps


def fewest(program: Program, effects: list[Effect], value: str, at: int) -> int:
    """The fewest streams that make a drop at a place legal, by trying all sets of streams."""
    for count in range(len(program.streams) + 1):
        for some in combinations(program.streams, count):
            if legal(program, with_lifetime(effects, value, at, some)):
                return count
    raise AssertionError(f"{value} cannot be dropped at {at}")


def brute_force(program: Program, effects: list[Effect], value: str) -> tuple[int, int, int]:
    """The same by trying every place: the first that order alone makes legal and that lets a launch have the memory;
    else right after the last use, kept for as few streams as any."""
    home = program.home()[value]
    launches = [k for k, e in enumerate(effects) if isinstance(e, Launch) and e.stream == home]
    uses = [k for k, e in enumerate(effects) if isinstance(e, Launch) and value in (*e.operands, *e.results)]
    for at in range(max(uses) + 1, len(effects) + 1):
        before = sum(k < at for k in launches)
        if before < len(launches) and legal(program, with_lifetime(effects, value, at, ())):
            return before, len(launches), 0
    at = max(uses) + 1
    while at < len(effects) and isinstance(effects[at], Record):  # the event of the last use comes first
        at += 1
    keeps = fewest(program, effects, value, at)
    return sum(k < at for k in launches), len(launches), keeps


def lifetimes_are_the_smallest(step: Step, streams: Mapping[int, str]) -> int:
    program = schedule(step, streams)
    check(program)
    effects, kept = without_lifetimes(program), 0
    memory = program.memory()
    dropped = [e.value for e in program if isinstance(e, Drop)]
    held = {memory[name] for name in program.outputs} | {put.name for put in program.inputs}
    assert sorted(dropped) == sorted(set(memory.values()) - held)
    for value in dropped:
        if any(other != value and root == value for other, root in memory.items()):
            continue  # a state: its uses go by several names
        assert lifetime(program, value) == brute_force(program, effects, value), f"{value}\n{program}"
        kept += lifetime(program, value)[2]
    return kept


def test_lifetimes_are_the_smallest():
    """And programs that keep are among those, and one that needs two keeping streams."""
    seen = set()

    @settings(quick, max_examples=200)
    @given(toys.steps(max_calls=8, kinds=toys.CALM), toys.orchestrations())
    def collect(step, streams):
        seen.add(min(lifetimes_are_the_smallest(step, streams), 2))

    collect()
    assert seen == {0, 1, 2}

    def compute(x):
        (a,) = bind(One(1), x)
        return [bind(One(s), y)[0] for s, y in ((3, a), (5, a), (7, x))]

    program = schedule(step_of(compute), placed({3: "side", 5: "comm"}))
    check(program)
    assert [e for e in program if isinstance(e, Keep)] == [Keep("out", "side"), Keep("out", "comm")]
    lifetimes_are_the_smallest(step_of(compute), placed({3: "side", 5: "comm"}))
