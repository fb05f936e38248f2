"""The law, rule by rule, on programs written by hand: each breach is named with both effects and what is missing."""

import pytest
from attrs import evolve

from mla_fx.effects import Aval, Drop, Input, Keep, Launch, LawError, Program, Record, Wait, check, violations
from tests.effects.toys import Exchange, One, Scratch, Two, Update

X = Input("x", Aval((2,), "fp64"))
Y = Input("y", Aval((2,), "fp64"))


def program(*effects, outputs=("out",), inputs=(X, Y)):
    return Program(inputs, outputs, effects)


#: main makes a; side makes b of it; main joins both.
FORKED = program(
    Launch("main", One(1), ("x",), ("a",)),
    Record("main", "e0"),
    Wait("side", "e0"),
    Launch("side", One(3), ("a",), ("b",)),
    Record("side", "e1"),
    Launch("main", One(5), ("y",), ("c",)),
    Wait("main", "e1"),
    Launch("main", Two(7), ("b", "c"), ("out",)),
)


def without(kept, *kinds):
    return evolve(kept, effects=tuple(e for e in kept.effects if not isinstance(e, kinds)))


def test_a_program_by_hand_is_legal():
    check(FORKED)
    assert violations(FORKED) == ()


def one(found, rule):
    match [v for v in found if v.rule == rule]:
        case [violation]:
            return violation
        case several:
            pytest.fail(f"rule {rule} must be broken once: {several}; all: {found}")


def test_rule_1_producer_on_another_stream():
    found = one(violations(FORKED.without(2)), 1)
    assert found.first == FORKED.effects[0]
    assert found.second == FORKED.effects[3]
    assert found.order
    assert found.message == (
        "one (b) on side takes a, which one (a) on main produces; missing order: one (a) on main -> one (b) on side"
    )


def test_rule_1_input_on_a_stream_that_main_has_not_forked():
    bad = program(
        Launch("side", One(1), ("x",), ("out",)),
        Record("side", "e0"),
        Wait("main", "e0"),
    )
    assert "takes input x, which is ready on main; missing order: start of main -> one (out) on side" in str(
        one(violations(bad), 1)
    )
    check(program(Record("main", "start"), Wait("side", "start"), *bad.effects))


def shared(op, results=("a",)):
    """Two launches of one kind on two streams that both follow the start; main joins."""
    return program(
        Record("main", "e0"),
        Wait("side", "e0"),
        Launch("main", op(1), ("x",), ("a",)),
        Launch("side", op(3), ("y",), ("b",)),
        Record("side", "e1"),
        Wait("main", "e1"),
        Launch("main", Two(5), ("a", "b"), ("out",)),
    )


def test_rule_2_workspace():
    found = one(violations(shared(Scratch)), 2)
    assert "share scratch 'workspace'; missing order: scratch (a) on main -> scratch (b) on side" in found.message
    check(shared(One))


def test_rule_2_state_read_while_it_is_written():
    bad = program(
        Record("main", "e0"),
        Wait("side", "e0"),
        Launch("side", One(1), ("x",), ("b",)),
        Launch("main", Update(3), ("x", "y"), ("x1",)),
        Record("side", "e1"),
        Wait("main", "e1"),
        outputs=("x1", "b"),
    )
    found = one(violations(bad), 2)
    assert found.message.startswith("update (x1) on main writes x, which one (b) on side uses; missing order: ")


def test_rule_2_replaced_version():
    bad = program(
        Launch("main", Update(1), ("x", "y"), ("x1",)),
        Launch("main", One(3), ("x",), ("out",)),
    )
    assert "one (out) on main takes x, which x1 has replaced" in one(violations(bad), 2).message
    assert "output x has been replaced by x1" in str(violations(evolve(bad, effects=bad.effects[:1], outputs=("x",))))


#: a lives on main and is used on side; main goes on allocating.
LENT = program(
    Launch("main", One(1), ("x",), ("a",)),
    Record("main", "e0"),
    Wait("side", "e0"),
    Launch("side", One(3), ("a",), ("b",)),
    Record("side", "e1"),
    Keep("a", "side"),
    Drop("a"),
    Launch("main", One(5), ("y",), ("c",)),
    Wait("main", "e1"),
    Launch("main", Two(7), ("b", "c"), ("out",)),
)


def test_rule_3_memory_is_kept_or_let_go_late():
    check(LENT)
    found = one(violations(LENT.without(5)), 3)
    assert found.first == LENT.effects[3]
    assert found.second == LENT.effects[7]
    assert "may take the memory of a, which one (b) on side uses and nothing keeps for side" in found.message
    late = [e for e in LENT.effects if not isinstance(e, Keep | Drop)]
    check(evolve(LENT, effects=(*late[:-1], Drop("a"), late[-1])))


def test_rule_3_keep_for_another_stream_does_not_help():
    bad = evolve(LENT, effects=tuple(Keep("a", "main") if isinstance(e, Keep) else e for e in LENT.effects))
    assert one(violations(bad), 3).order


def test_rule_3_use_after_drop_and_drops_that_may_not_be():
    gone = program(Launch("main", One(1), ("x",), ("a",)), Drop("a"), Launch("main", One(3), ("a",), ("out",)))
    assert "a is used by 'out = one a' after 'drop a'" in one(violations(gone), 3).message
    assert "input x belongs to the caller" in str(violations(program(Drop("x"), outputs=("y",))))
    assert "output out is dropped" in str(violations(program(Launch("main", One(1), ("x",), ("out",)), Drop("out"))))
    twice = program(Launch("main", One(1), ("x",), ("a",)), Drop("a"), Drop("a"), outputs=("x",))
    assert "'drop a' after 'drop a'" in str(violations(twice))


def test_rule_4_events():
    assert "nobody waits for it" in one(violations(program(Record("main", "e"), outputs=("x",))), 4).message
    twice = program(Record("main", "e"), Record("main", "e"), Wait("side", "e"), outputs=("x",))
    assert "event e is recorded twice" in one(violations(twice), 4).message
    early = program(Wait("side", "e"), Record("main", "e"), Wait("side", "e"), outputs=("x",))
    assert "side waits for event e, which is not recorded before; missing: record e" in str(violations(early))


def test_rule_5_join():
    found = one(violations(FORKED.without(6)), 5)
    assert "side has not joined main at the end; missing order: one (b) on side -> the end of main" in found.message


def test_rule_6_collectives():
    found = one(violations(shared(Exchange)), 6)
    assert "share group 'dcp'; missing order: exchange (a) on main -> exchange (b) on side" in found.message


def test_rule_0_form():
    unknown = program(Launch("main", One(1), ("nothing",), ("out",)))
    assert "nothing is used by 'out = one nothing' but nothing before it produces it" in str(violations(unknown))
    again = program(Launch("main", One(1), ("x",), ("x",)), outputs=("x",))
    assert "x is produced twice" in str(violations(again))
    assert "output out is produced by nothing" in str(violations(program()))
    arity = program(Launch("main", Two(1), ("x",), ("out",)))
    assert "two takes 2 operands (a, b): got 1" in str(violations(arity))


def test_every_breach_is_told_at_once():
    with pytest.raises(LawError) as caught:
        check(without(FORKED, Wait, Record))
    assert {v.rule for v in caught.value.violations} == {1, 5}
    assert str(caught.value).count("missing order") == len(caught.value.violations) == 3


def test_programs_compare_by_value():
    assert program(*FORKED.effects) == FORKED
    assert FORKED.without(0) != FORKED
    assert evolve(FORKED, effects=tuple(evolve(e, why="other") if isinstance(e, Wait) else e for e in FORKED)) == FORKED
