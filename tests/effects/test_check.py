"""The law, rule by rule, on programs written by hand: each breach is named with both effects and what is missing."""

import pickle
from typing import ClassVar

import pytest
from attrs import evolve, frozen

from mla_fx.effects import (
    Aval,
    Drop,
    Group,
    Input,
    Keep,
    Launch,
    LawError,
    Program,
    Record,
    ShapeError,
    Stage,
    Wait,
    check,
    violations,
)
from tests.effects.toys import Exchange, One, Room, Scratch, Swap, Toy, Two, Update

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
    assert "share workspace 'workspace'; missing order: scratch (a) on main -> scratch (b) on side" in found.message
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
    assert "may take the memory of a, which one (b) on side uses and nothing keeps until it has" in found.message
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


def test_rule_5_a_stream_that_only_waits():
    """Nothing runs there, but a graph that is captured would have a branch without an end."""
    idle = program(Record("main", "e0"), Wait("side", "e0"), Launch("main", One(1), ("x",), ("out",)))
    found = one(violations(idle), 5)
    assert found.message == "side has not joined main since 'wait e0'; missing: record on side"
    assert found.first == idle.effects[1]
    check(program(*idle.effects[:2], Record("side", "e1"), *idle.effects[2:], Wait("main", "e1")))


def test_rule_5_a_stream_that_waits_again_after_it_joined():
    again = program(*FORKED.effects, Record("main", "e2"), Wait("side", "e2"))
    assert one(violations(again), 5).message == "side has not joined main since 'wait e2'; missing: record on side"


def test_rule_6_collectives():
    found = one(violations(shared(Exchange)), 6)
    assert (
        "exchange (a) on main and exchange (b) on side are collectives, which all ranks must run in one order; "
        "missing order: exchange (a) on main -> exchange (b) on side"
    ) in found.message


def test_rule_6_across_groups():
    """Two ranks that run collectives of two groups in two orders wait for each other."""
    tp, dcp = Launch("main", Exchange(1, Group("tp", 2)), ("x",), ("a",)), Launch("side", Exchange(3), ("y",), ("b",))
    forked = shared(Exchange).effects
    assert one(violations(program(*forked[:2], tp, dcp, *forked[4:])), 6).order


def test_rule_6_groups_that_are_declared_independent():
    """Their collectives are in one order among themselves, and in none with those of others."""
    forked = shared(Exchange).effects

    def of(first, second):
        return program(
            *forked[:2],
            Launch("main", Exchange(1, first), ("x",), ("a",)),
            Launch("side", Exchange(3, second), ("y",), ("b",)),
            *forked[4:],
        )

    alone, other = Group("ep", 2, independent=True), Group("pp", 2, independent=True)
    tp, dcp = Group("tp", 2), Group("dcp", 2)
    for first, second in ((alone, tp), (dcp, alone), (alone, other)):
        check(of(first, second))
    for first, second in ((tp, dcp), (alone, alone)):
        assert one(violations(of(first, second)), 6).order
    unsure = one(violations(of(alone, Group("ep", 2))), 0)
    assert unsure.message == (
        "'b = exchange y    over ep[2]' and 'a = exchange x    over ep[2] independent' must say the same of their "
        "group: got ep[2] and ep[2] independent"
    )


def test_groups_and_workspaces_of_one_name_are_kept_apart():
    """`Swap` uses a workspace called dcp, and `Exchange` runs over a group that is called so."""
    forked = shared(Swap).effects
    mixed = program(*forked[:3], Launch("side", Exchange(3), ("y",), ("b",)), *forked[4:])
    assert [violation.rule for violation in violations(mixed)] == [6]
    alone = program(*forked[:3], Launch("side", Room(3), ("y",), ("b",)), *forked[4:])
    check(alone)


STAGED = Input("s", X.aval, "staged")


def test_rule_1_staged_inputs_are_ready_behind_their_stage():
    early = program(Launch("main", One(1), ("s",), ("out",)), Stage(("s",)), inputs=(STAGED,))
    found = one(violations(early), 1)
    assert found.message == "one (out) on main takes input s, which nothing has staged; missing: stage s"
    assert not found.order
    check(program(Stage(("s",)), Launch("main", One(1), ("s",), ("out",)), inputs=(STAGED,)))
    side = (Launch("side", One(1), ("s",), ("out",)), Record("side", "e1"), Wait("main", "e1"))
    forked = (Record("main", "e0"), Stage(("s",)), Wait("side", "e0"))
    found = one(violations(program(*forked, *side, inputs=(STAGED,))), 1)
    assert found.order and "missing order: start of main -> one (out) on side" in found.message
    check(program(forked[1], forked[0], forked[2], *side, inputs=(STAGED,)))


def test_rule_0_stages():
    wrong = program(Stage(("x",)), outputs=("x",))
    assert "'stage x' must name inputs that are staged: got x" in one(violations(wrong), 0).message
    twice = program(Stage(("s",)), Stage(("s",)), outputs=("s",), inputs=(STAGED,))
    assert one(violations(twice), 0).message == "input s is staged twice, the second time by 'stage s'"


@frozen
class Lengths(Toy):
    operands: ClassVar = {"a": "T", "lengths": "B host"}


def test_rule_0_places():
    host = Input("n", Aval((3,), "int64"), "host")
    check(program(Launch("main", Lengths(1), ("x", "n"), ("out",)), inputs=(X, host)))
    sent = Input("n", Aval((3,), "int64"))
    bad = program(Launch("main", Lengths(1), ("x", "n"), ("out",)), inputs=(X, sent))
    assert one(violations(bad), 0).message == (
        "lengths of 'out = lengths x n' must be on the host: got n, which is not"
    )
    bad = program(Launch("main", One(1), ("y",), ("out",)), inputs=(X, Input("y", Y.aval, "host")))
    assert "a of 'out = one y' must be on the device: got y, which is not" in one(violations(bad), 0).message


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((4, 5), "host", "dtype must be one of bf16, fp16, fp32, fp64, int8, int32, int64: got 'host'"),
        ([1, 2], "bf16", r"shape must be a tuple of integers: got \[1, 2\]"),
        ((1, -2), "bf16", r"every axis must be an integer of at least 0: got shape \(1, -2\)"),
        ((True,), "bf16", "every axis must be an integer of at least 0"),
    ],
)
def test_an_aval_that_is_none(shape, dtype, message):
    with pytest.raises(ShapeError, match=message):
        Aval(shape, dtype)


@frozen
class Pair(Toy):
    """Writes two states."""

    operands: ClassVar = {"left": "T", "right": "T"}
    results: ClassVar = ("left", "right")
    writes: ClassVar = {"left": "left", "right": "right"}


def test_rule_2_one_memory_in_two_places_of_a_launch():
    check(program(Launch("main", Pair(1), ("x", "y"), ("x1", "y1")), outputs=("x1", "y1")))
    twice = program(Launch("main", Pair(1), ("x", "x"), ("x1", "y1")), outputs=("x1",))
    found = [v.message for v in violations(twice) if v.rule == 2]
    assert "pair (x1) on main writes x as left and takes it as right too" in found
    itself = program(Launch("main", Update(1), ("x", "x"), ("x1",)), outputs=("x1",))
    assert one(violations(itself), 2).message == "update (x1) on main writes x as state and takes it as a too"


#: a is used on two streams; the last of them has waited for the other; main goes on allocating.
CHAIN = program(
    Launch("main", One(1), ("x",), ("a",)),
    Record("main", "e0"),
    Wait("side", "e0"),
    Launch("side", One(3), ("a",), ("b",)),
    Record("side", "e1"),
    Wait("comm", "e1"),
    Launch("comm", Two(5), ("a", "b"), ("c",)),
    Record("comm", "e2"),
    Keep("a", "comm"),
    Drop("a"),
    Launch("main", One(7), ("y",), ("d",)),
    Wait("main", "e2"),
    Launch("main", Two(9), ("c", "d"), ("out",)),
)


def test_rule_3_a_keeping_stream_that_has_seen_a_use_covers_it():
    check(CHAIN)
    first = evolve(CHAIN, effects=tuple(Keep("a", "side") if isinstance(e, Keep) else e for e in CHAIN))
    found = one(violations(first), 3)  # side has seen its own use alone
    assert found.first == CHAIN.effects[6]
    assert found.second == CHAIN.effects[10]
    # What a stream will have seen later does not count: the keeping ends where the stream was at the drop.
    before = list(CHAIN.effects)
    before[8:10] = []
    before[5:5] = [Keep("a", "comm")]
    before[7:7] = [Drop("a")]
    assert 3 in {v.rule for v in violations(evolve(CHAIN, effects=tuple(before)))}


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


def test_a_law_error_keeps_what_it_found_through_pickle():
    with pytest.raises(LawError) as caught:
        check(FORKED.without(2))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.violations == caught.value.violations
    assert pickle.loads(pickle.dumps(FORKED)) == FORKED
