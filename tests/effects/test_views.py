"""A result that its op declares a view: law and scheduler see one memory under two names."""

from itertools import product
from typing import ClassVar

import pytest
from attrs import evolve, frozen

from mla_fx.effects import (
    Drop,
    Equation,
    Found,
    Group,
    InputError,
    Keep,
    Launch,
    Program,
    Record,
    ScheduleError,
    StepError,
    Wait,
    bind,
    check,
    parameters,
    rewrite,
    schedule,
    trace,
    violations,
)
from mla_fx.effects.passes import definition
from tests.effects.judge import Judge
from tests.effects.test_check import one, program
from tests.effects.test_judge import agree
from tests.effects.test_law_teeth import SEARCH, serial
from tests.effects.toys import DCP, Fork, One, Peek, Toy, Two, Update, X, goes_wrong, placed, right, run

# --- the law -----------------------------------------------------------------------

#: main makes a and a view of it; side uses the view; main goes on allocating.
SEEN = program(
    Launch("main", One(1), ("x",), ("a",)),
    Launch("main", Peek(3), ("a",), ("view", "made")),
    Record("main", "e0"),
    Wait("side", "e0"),
    Launch("side", One(5), ("view",), ("b",)),
    Record("side", "e1"),
    Keep("a", "side"),
    Drop("a"),
    Launch("main", Two(7), ("y", "made"), ("c",)),
    Wait("main", "e1"),
    Launch("main", Two(9), ("b", "c"), ("out",)),
)


def swapped(kept: Program, *pairs: tuple[object, object]) -> Program:
    return evolve(kept, effects=tuple(dict(pairs).get(effect, effect) for effect in kept))


def test_the_use_of_a_view_keeps_what_it_is_a_view_of_alive():
    check(SEEN)
    found = one(violations(SEEN.without(6)), 3)
    assert (found.first, found.second, found.order) == (SEEN.effects[4], SEEN.effects[8], True)
    assert "may take the memory of a, which one (b) on side uses and nothing keeps until it has" in found.message
    assert Judge(SEEN.without(6)).verdict() == {"race"}
    assert goes_wrong(SEEN.without(6), run(SEEN), SEARCH)


def test_either_name_keeps_and_drops_the_memory():
    for keep, drop in product(("a", "view"), repeat=2):
        either = swapped(SEEN, (Keep("a", "side"), Keep(keep, "side")), (Drop("a"), Drop(drop)))
        assert agree(either) == "legal"
        right(either, run(SEEN), range(20))


def test_what_has_been_dropped_under_one_name_is_gone_under_both():
    for gone, used in (("a", "view"), ("view", "a")):
        late = program(*SEEN.effects[:2], Drop(gone), Launch("main", Two(5), (used, "made"), ("out",)))
        found = one(violations(late), 3).message
        assert found == f"{used} is used by 'out = two {used} made' after 'drop {gone}'"
    held = program(*SEEN.effects[:2], Drop("a"), outputs=("view", "made"))
    assert "output view is dropped" in one(violations(held), 3).message
    mine = program(Launch("main", Peek(3), ("x",), ("view", "made")), Drop("view"), outputs=("made",))
    assert "input x belongs to the caller and may not be dropped" in one(violations(mine), 3).message


def test_a_view_is_there_when_what_it_is_a_view_of_is():
    """Whoever takes it must be behind the producer of that, and need not be behind the launch that gave it."""
    before = swapped(SEEN, (SEEN.effects[1], SEEN.effects[2]), (SEEN.effects[2], SEEN.effects[1]))
    assert agree(before) == "legal"
    right(before, run(SEEN), range(20))
    found = one(violations(SEEN.without(3)), 1)
    assert found.message == (
        "one (b) on side takes view, which one (a) on main produces; missing order: one (a) on main -> one (b) on side"
    )
    of_input = program(Launch("main", Peek(1), ("x",), ("view", "made")), Launch("side", One(3), ("view",), ("out",)))
    assert "takes input x, which is ready on main; missing order: start of main" in one(violations(of_input), 1).message


#: main makes a and a view of it; side reads a; main writes through the view.
WRITTEN = program(
    Launch("main", One(1), ("x",), ("a",)),
    Record("main", "e0"),
    Wait("side", "e0"),
    Launch("side", One(3), ("a",), ("read",)),
    Record("side", "e1"),
    Launch("main", Peek(5), ("a",), ("view", "made")),
    Wait("main", "e1"),
    Launch("main", Update(7), ("view", "y"), ("out",)),
    outputs=("out", "read", "made"),
)


def test_a_write_through_a_view_is_a_write_of_what_it_is_a_view_of():
    assert agree(WRITTEN) == "legal"
    late = evolve(WRITTEN, effects=(*WRITTEN.effects[:6], WRITTEN.effects[7], WRITTEN.effects[6]))
    found = one(violations(late), 2)
    assert found.message.startswith("update (out) on main writes view, which one (read) on side uses; missing order: ")
    assert agree(late) == "wrong" and goes_wrong(late, run(WRITTEN), SEARCH)
    for name in ("a", "view"):
        stale = program(*WRITTEN.effects, Launch("main", One(9), (name,), ("again",)), outputs=("again",))
        assert f"takes {name}, which out has replaced" in one(violations(stale), 2).message
        assert f"output {name} has been replaced by out" in str(violations(evolve(WRITTEN, outputs=(name,))))


def test_a_state_may_not_be_an_operand_twice_under_two_names():
    peek, twice = SEEN.effects[1], Launch("main", Update(3), ("view", "a"), ("out",))
    found = one(violations(program(SEEN.effects[0], peek, twice)), 2)
    assert found.message == ("update (out) on main writes view as state and takes a, in the same memory, as a too")


# --- the scheduler -----------------------------------------------------------------


def scheduled(function, streams):
    step = trace(function, "toy", x=X, y=X)
    found = schedule(step, placed(streams))
    assert agree(found) == "legal"
    right(found, run(serial(step)), range(20))
    return found


def test_memory_is_let_go_behind_the_uses_of_its_views():
    def lends(x, y):
        (a,) = bind(One(1), x)
        view, made = bind(Peek(3), a)
        (b,) = bind(One(5), view)
        (c,) = bind(Two(7), y, made)
        return bind(Two(9), b, c)

    found = scheduled(lends, {5: "side"})
    of_memory = [effect for effect in found if isinstance(effect, Keep | Drop) and effect.value in ("out", "view")]
    assert of_memory == [Drop("out")]
    drop, last = found.effects.index(Drop("out")), found.launches[-1]
    assert found.effects[drop:].index(last) == 1  # main has joined there, and takes the memory at the earliest


def test_readers_of_all_names_come_before_a_write_through_one():
    def writes(x, y):
        (a,) = bind(One(1), x)
        view, made = bind(Peek(3), a)
        (state,) = bind(Update(5), view, y)
        (late,) = bind(One(7), a)  # of the version before
        return state, late, made

    found = scheduled(writes, {7: "side"})
    assert [launch.op.salt for launch in found.launches] == [1, 3, 7, 5]


def test_the_scheduler_refuses_one_value_written_as_two_states():
    def twice(x, y):
        view, made = bind(Peek(1), x)
        return *bind(Update(3), view, y), *bind(Update(5), x, y), made

    message = r"x is a state, and a version .*: got 'state = update view y' and 'state_1 = update x y'; the second must"
    with pytest.raises(ScheduleError, match=message):
        schedule(trace(twice, x=X, y=X), placed({}))
    with pytest.raises(ScheduleError, match=r"view and x: a state must be one operand of what writes it: got 'state ="):
        schedule(trace(lambda x: bind(Update(3), bind(Peek(1), x)[0], x), x=X), placed({}))


def test_a_parameter_is_not_written_through_a_view():
    with pytest.raises(StepError, match="w: a parameter must not be written"):
        trace(lambda w, x: bind(Update(3), bind(Peek(1), w)[0], x), w=parameters(X), x=X)
    step = trace(lambda s, x: bind(Update(3), bind(Peek(1), s)[0], x), s=X, x=X)
    assert [put.role for put in step.inputs] == ["state", "data"]
    assert schedule(step, placed({})).states() == ("s",)


# --- what an op may say --------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"views": {"out": "b"}}, "must give an operand for a result: got 'out': 'b'"),
        ({"views": {"other": "a"}}, "must give an operand for a result: got 'other': 'a'"),
        ({"views": {"out": "a"}, "writes": {"a": "out"}}, "has a next version, and no view beside it: got 'a'"),
        ({"views": {"out": "a"}, "operands": {"a": "T host"}}, "must be of memory of this rank's device: got 'a'"),
        ({"views": {"out": "a"}, "communicates": "all_gather"}, "must be of memory of this rank's device: got 'a'"),
    ],
)
def test_a_view_that_cannot_be(said, message):
    class Bad(Toy):
        operands: ClassVar = {"a": "T"}

    for name, value in said.items():
        setattr(Bad, name, value)
    with pytest.raises(InputError, match=f"bad.views: .*{message}"):
        Bad(1).viewed()


@frozen
class Whole(Toy):
    """An op that is made of others and says that it gives a view."""

    operands: ClassVar = {"a": "T"}
    results: ClassVar = ("view", "made")
    views: ClassVar = {"view": "a"}

    def definition(self, a):
        view, made = bind(Peek(self.salt), a)
        return view, *bind(One(self.salt), made)


@frozen
class Copied(Whole):
    """Says so too, and is made of others that give memory of their own."""

    def definition(self, a):
        return *bind(One(self.salt), a), *bind(One(self.salt), a)


@frozen
class Unsaid(Whole):
    """Gives a view, and says nothing."""

    views: ClassVar = {}


def test_the_parts_of_an_op_give_views_where_it_does():
    assert [part.op.name for part in definition(Whole(1), [X]).equations] == ["peek", "one"]
    for op, said in ((Copied(1), "a"), (Unsaid(1), "nothing")):
        with pytest.raises(StepError, match=f"{op.name}: its parts must give views of what it does, {said}: got"):
            definition(op, [X])


def test_a_pass_leaves_a_view_a_view():
    """What gives memory of its own may not take its place, since a write through it would then be lost."""
    step = trace(lambda s, x: bind(Update(5), bind(Peek(3), s)[0], x), s=X, x=X)

    def by(op: Toy):
        def match(step, equation):
            whole = Equation(op, equation.operands, equation.results, equation.tag)
            return Found((equation,), whole) if isinstance(equation.op, Peek) else None

        return rewrite(step, match)

    assert by(Fork(3)) == step
    replaced = by(Whole(3))
    assert [equation.op.name for equation in replaced.equations] == ["whole", "update"]
    right(schedule(replaced, placed({5: "side"})), run(serial(step)), (None, *range(8)))


def test_groups_say_so_where_they_are_independent():
    assert str(Group("ep", 8, independent=True)) == "ep[8] independent" and str(DCP) == "dcp[2]"
    with pytest.raises(InputError, match="independent: must be True or False: got 1"):
        Group("ep", 8, independent=1)
