"""Passes: what a rewritten step computes is what it computed before, and a find that would change it is left alone."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from mla_fx.effects import (
    MAIN,
    Aval,
    Equation,
    Found,
    Input,
    Launch,
    Op,
    Step,
    StepError,
    Value,
    bind,
    check,
    inline,
    rewrite,
    schedule,
)
from mla_fx.effects.passes import defined, definition
from mla_fx.effects.step import avals_of
from tests.effects import toys
from tests.effects.test_schedule import quick, settings
from tests.effects.toys import Exchange, Fork, One, Scratch, Toy, Two, Update, X, put, step_of


def serial(step: Step):
    return schedule(step, lambda equation: MAIN)


# --- a whole of any parts --------------------------------------------------------


def whole_of(parts: Sequence[Equation], given_: Sequence[str], memory: dict[str, str]) -> Equation:
    """An op made for these equations: it takes what they take from outside and gives what is asked for of theirs."""
    made = {name for part in parts for name in part.results}
    outside = list(dict.fromkeys(name for part in parts for name in part.operands if name not in made))
    call = {name: f"x{k}" for k, name in enumerate(outside)}
    newest = {memory[name]: name for part in parts for name in part.results}
    writes = {
        call[name]: newest[memory[name]]
        for part in parts
        for position in part.op.written()
        if (name := part.operands[position]) in call and newest[memory[name]] in given_
    }

    def run(self: Op, *values: Value) -> tuple[Value, ...]:
        found = dict(zip(outside, values, strict=True))
        for part in parts:
            found.update(zip(part.results, bind(part.op, *(found[name] for name in part.operands)), strict=True))
        return tuple(found[name] for name in given_)

    body: dict[str, Any] = {
        "operands": dict.fromkeys(call.values(), "T"),
        "results": tuple(given_),
        "writes": writes,
        "uses": tuple(dict.fromkeys(name for part in parts for name in part.op.uses)),
        "definition": run,
    }
    op = frozen(type("Whole", (Toy,), body))
    return Equation(op(parts[-1].op.salt), tuple(outside), tuple(given_), parts[-1].tag)


#: Random steps, half of them of ops with more than one way to be looked into: results that are given or not, states.
STEPS = st.one_of(toys.steps(), toys.steps(kinds=(One, Fork, Fork, Update)))


@st.composite
def patterns(draw: st.DrawFn) -> Callable[[Step], Callable[[Step, Equation], Found | None]]:
    """Random sets of equations of a step, to be made one each; which of their results are given is random too."""
    wanted = draw(st.lists(st.sets(st.integers(0, 8), min_size=1, max_size=4), min_size=1, max_size=3))
    hidden = draw(st.lists(st.booleans(), min_size=32, max_size=32))

    def on(step: Step) -> Callable[[Step, Equation], Found | None]:
        memory = schedule(step, lambda equation: MAIN).memory()
        finds = []
        for indices in wanted:
            parts = [step.equations[k] for k in sorted(indices) if k < len(step.equations)]
            parts = [part for part in parts if not part.op.communicates]
            results = [name for part in parts for name in part.results]
            replaced = {part.operands[at] for part in parts for at in part.op.written()}
            shown = [name for k, name in enumerate(results) if name not in replaced and not hidden[k]]
            if parts and shown:
                finds.append(Found(tuple(parts), whole_of(parts, shown, memory)))

        def match(step: Step, equation: Equation) -> Found | None:
            return next((found for found in finds if found.parts[-1] == equation), None)

        return match

    return on


def computes_the_same(step: Step, streams: Any, pattern: Any) -> int:
    """Rewritten, and inlined again: on the plain run and on the hostile machine; returns how much was rewritten."""
    expected = toys.run(serial(step))
    rewritten = rewrite(step, pattern(step))
    inlined = inline(rewritten)
    assert not any(defined(equation.op) for equation in inlined.equations)
    for other in (rewritten, inlined):
        assert (other.inputs, other.outputs) == (step.inputs, step.outputs)
        for program in (serial(other), schedule(other, streams)):
            check(program)
            toys.right(program, expected, (None, 1, 2))
    return sum(defined(equation.op) for equation in rewritten.equations)


@settings(quick, max_examples=30)
@given(STEPS, toys.orchestrations(), patterns())
def test_a_rewritten_step_computes_the_same(step, streams, pattern):
    computes_the_same(step, streams, pattern)


def test_some_are_rewritten_and_some_are_left_alone():
    """The property above is not empty: wholes of several parts are put in, and others are refused."""
    seen = set()

    @settings(quick, max_examples=240)
    @given(STEPS, patterns())
    def collect(step, pattern):
        match = pattern(step)
        found = [one for equation in step.equations if (one := match(step, equation))]
        rewritten = rewrite(step, match)
        for one in found:
            seen.add((len(one.parts) > 1, one.whole in rewritten.equations))

    collect()
    assert seen == {(False, True), (False, False), (True, True), (True, False)}


@pytest.mark.soak
@settings(quick, derandomize=False, max_examples=5000)
@given(STEPS, toys.orchestrations(), patterns())
def test_many_rewritten_steps_compute_the_same(step, streams, pattern):
    computes_the_same(step, streams, pattern)


# --- a fused op, by hand ---------------------------------------------------------


@frozen
class OneUpdate(Toy):
    """`state`, `a` -> the next version of `state`: an `Update` by `One` of `a`."""

    operands: ClassVar = {"state": "T", "a": "T"}
    results: ClassVar = ("state",)
    writes: ClassVar = {"state": "state"}

    def definition(self, state, a):
        (b,) = bind(One(self.salt), a)
        return bind(Update(self.salt + 2), state, b)


def fuse(step: Step, equation: Equation) -> Found | None:
    if not isinstance(equation.op, Update):
        return None
    for other in step.equations:
        if isinstance(other.op, One) and other.results == equation.operands[1:]:
            operands = (equation.operands[0], *other.operands)
            return Found(
                (other, equation), Equation(OneUpdate(other.op.salt), operands, equation.results, equation.tag)
            )
    return None


def written(compute) -> list[str]:
    return [equation.op.name for equation in rewrite(step_of(compute), fuse).equations]


def test_equations_are_replaced_where_the_last_was():
    def compute(state, x):
        (b,) = bind(One(1), x)
        (c,) = bind(One(7), x)
        return bind(Update(3), state, b)[0], c

    step = step_of(compute)
    rewritten = rewrite(step, fuse)
    first = Equation(One(7), ("x",), ("out_1",))
    assert rewritten == evolve(step, equations=(first, Equation(OneUpdate(1), ("state", "x"), ("state_1",))))
    assert rewrite(step, lambda step, equation: None) == step
    assert inline(rewritten) == evolve(
        step,
        equations=(
            first,
            Equation(One(1), ("x",), ("state_1_out",)),
            Equation(Update(3), ("state", "state_1_out"), ("state_1",)),
        ),
    )
    assert inline(rewritten, keep={OneUpdate}) == rewritten


def test_a_result_that_others_need_is_left_alone():
    assert written(lambda state, x: bind(Update(3), state, bind(One(1), x)[0])) == ["one_update"]

    def is_output(state, x):
        (b,) = bind(One(1), x)
        return bind(Update(3), state, b)[0], b

    def is_read(state, x):
        (b,) = bind(One(1), x)
        (new,) = bind(Update(3), state, b)
        return bind(Two(5), new, b)[0], new

    assert written(is_output) == ["one", "update"]
    assert written(is_read) == ["one", "update", "two"]


def test_a_state_that_changes_in_between_is_left_alone():
    """The first part reads x, which is written before the last part: later it would read another version."""

    def compute(state, x):
        (b,) = bind(One(1), x)
        (x,) = bind(Update(5), x, state)
        return bind(Update(3), state, b)[0], x

    def between_reads_what_is_written(state, x):
        (b,) = bind(One(1), x)
        (seen,) = bind(One(5), state)
        return bind(Update(3), state, b)[0], seen

    assert written(compute) == ["one", "update", "update"]
    assert written(between_reads_what_is_written)[-1] in ("update", "one_update")  # either is right


def test_finds_that_share_parts_are_not_both_taken():
    def compute(state, x):
        (b,) = bind(One(1), x)
        return bind(Update(3), state, b)

    def greedy(step: Step, equation: Equation) -> Found | None:
        """One takes the place of itself, and then is a part of another."""
        if isinstance(equation.op, One):
            return Found((equation,), evolve(equation, op=One(9)))
        return fuse(step, equation)

    step = rewrite(step_of(compute), greedy)
    assert [equation.op for equation in step.equations] == [One(9), Update(3)]


def test_a_whole_that_writes_other_states_is_left_alone():
    def reads_only(step: Step, equation: Equation) -> Found | None:
        return Found((equation,), evolve(equation, op=Two(3))) if isinstance(equation.op, Update) else None

    step = step_of(lambda state, x: bind(Update(3), state, x))
    assert rewrite(step, reads_only) == step

    def writes(step: Step, equation: Equation) -> Found | None:
        return Found((equation,), evolve(equation, op=Update(3))) if isinstance(equation.op, Two) else None

    step = step_of(lambda state, x: bind(Two(3), state, x))
    assert rewrite(step, writes) == step


def test_parts_are_equations_of_the_step():
    stranger = Equation(One(1), ("x",), ("nobody",))
    with pytest.raises(StepError, match="parts: each must be an equation of toy: got 'nobody = one x'"):
        rewrite(step_of(lambda x: bind(One(1), x)), lambda step, equation: Found((stranger,), stranger))


class Column(Op):
    """`a` [T] -> [T, 1], as no op of the toys."""

    operands: ClassVar = {"a": "T"}

    def shape_rule(self, axes, dtype):
        return (Aval((axes["T"], 1), dtype),)


def test_a_whole_has_the_shape_of_its_parts():
    def wrong(step: Step, equation: Equation) -> Found | None:
        return Found((equation,), evolve(equation, op=Column()))

    step = step_of(lambda state, x: bind(One(1), x, names=("out",)))
    with pytest.raises(StepError, match=r"'out = column x': must give fp64\[2\], as its parts: got fp64\[2, 1\]"):
        rewrite(step, wrong)


def test_a_rewritten_step_knows_what_its_values_are():
    """Without asking every equation again; and where nothing is found it is the step itself."""
    step = step_of(lambda state, x: bind(One(2), *bind(One(1), x)))
    made = rewrite(step, lambda step, equation: Found((equation,), evolve(equation, op=One(7))))
    assert made != step and made.avals() == avals_of(made.inputs, made.equations)
    assert rewrite(step, lambda step, equation: None) is step


def test_a_find_is_asked_of_its_last_part():
    """A match that finds from the front is not heard: what is in between is known at the end only."""
    step = step_of(lambda state, x: bind(Update(3), state, bind(One(1), x)[0]))

    def early(step: Step, equation: Equation) -> Found | None:
        return fuse(step, step.equations[-1]) if isinstance(equation.op, One) else None

    assert rewrite(step, early) == step
    assert rewrite(step, lambda step, equation: Found((), equation)) == step


# --- definitions -----------------------------------------------------------------


def test_a_fused_op_runs_by_its_definition():
    step = rewrite(step_of(lambda state, x: bind(Update(3), state, bind(One(1), x)[0])), fuse)
    plain = step_of(lambda state, x: bind(Update(3), state, bind(One(1), x)[0]))
    assert [type(e.op) for e in step.equations] == [OneUpdate]
    for seed in (None, 1, 2):
        assert toys.run(serial(step), seed) == toys.run(serial(plain))
    with_rule = toys.backend().with_rules({OneUpdate: toys.update_rule})
    arguments = [[v.clone() for v in given] for given in _arguments(step)]
    assert float(with_rule.compile(serial(step))(*arguments)[0][0][0]) != toys.run(serial(plain))[0]  # its own rule


def _arguments(step: Step) -> list[Any]:
    import torch

    return [[torch.full((toys.SIZE,), 5.0, dtype=torch.float64) for _ in range(toys.RANKS)] for _ in step.inputs]


def test_definitions_of_definitions_are_inlined_too():
    @frozen
    class Outer(Toy):
        operands: ClassVar = {"state": "T", "a": "T"}
        results: ClassVar = ("state", "out")
        writes: ClassVar = {"state": "state"}

        def definition(self, state, a):
            (new,) = bind(OneUpdate(self.salt), state, a)
            return new, bind(Two(9), new, a)[0]

    step = step_of(lambda state, x: bind(Outer(1), state, x))
    assert [e.op.name for e in inline(step).equations] == ["one", "update", "two"]
    assert [e.op.name for e in inline(step, keep={OneUpdate}).equations] == ["one_update", "two"]
    assert toys.run(serial(inline(step))) == toys.run(serial(step)) == toys.run(serial(step), 3)


def test_inlined_parts_have_the_tag_of_the_whole():
    whole = Equation(OneUpdate(1), ("state", "x"), ("new",), "layers.0")
    step = Step("toy", (put("state"), put("x")), (whole,), ("new",))
    assert {equation.tag for equation in inline(step).equations} == {"layers.0"}
    assert {e.tag for e in serial(inline(step)) if isinstance(e, Launch)} == {"layers.0"}


def bad(definition_: Callable[..., Any], **body: Any) -> Op:
    given_ = {"operands": {"a": "T", "b": "T"}, "definition": lambda self, *values: definition_(*values), **body}
    made: Op = frozen(type("Bad", (Toy,), given_))(1)
    return made


WRITES: dict[str, Any] = {"results": ("out",), "writes": {"a": "out"}}


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (bad(lambda a, b: None), "its definition must give what it gives: got none"),
        (bad(lambda a, b: bind(Fork(1), a)), r"its definition must give what it gives: got fp64\[2\], fp64\[2\]"),
        (bad(lambda a, b: (a,)), "its parts must give every result, and each once"),
        (bad(lambda a, b: bind(One(1), a) * 2, results=("x", "y")), "its parts must give every result, and each once"),
        (bad(lambda a, b: bind(Update(1), a, b)), "its parts must write what it writes, nothing: got"),
        (bad(lambda a, b: bind(Two(1), a, b), **WRITES), "its parts must write what it writes, a: got"),
        (bad(lambda a, b: bind(Update(1), b, a), **WRITES), "its parts must write what it writes, a: got"),
        (
            bad(lambda a, b: (bind(Update(1), a, b), bind(One(1), b))[1]),
            None,  # the write is dead code there
        ),
        (
            bad(lambda a, b: bind(Update(1), a, b) + bind(One(3), a), results=("s", "o"), writes={"a": "s"}),
            "its parts run as written, so none may take what is replaced: got 'out = one a'",
        ),
        (bad(lambda a, b: bind(Exchange(1), a)), "the parts of an op must not communicate: got 'out = exchange a'"),
        (bad(lambda a, b: bind(Scratch(1), a)), "must use the workspaces of its parts: got 'out = scratch a', which"),
        (bad(lambda a, b: bind(Scratch(1), a), uses=("workspace",)), None),
    ],
)
def test_a_definition_is_held_against_the_op(op, message):
    if message is None:
        definition(op, (X, X))
        return
    with pytest.raises(StepError, match=f"bad: {message}"):
        definition(op, (X, X))


def test_what_has_no_definition():
    assert not defined(One(1)) and defined(OneUpdate(1))
    assert One(1).definition() is None
    assert inline(step_of(lambda x: bind(One(1), x))) == step_of(lambda x: bind(One(1), x))


def test_a_definition_has_the_operands_where_the_op_has_them():
    @frozen
    class Lengths(Toy):
        operands: ClassVar = {"a": "T", "lengths": "B host"}

        def definition(self, a, lengths):
            assert lengths.place == "host"
            return bind(One(self.salt), a)

    step = definition(Lengths(1), (X, Aval((3,), "int64")))
    assert step.inputs == (put("a"), Input("lengths", Aval((3,), "int64"), "host"))
