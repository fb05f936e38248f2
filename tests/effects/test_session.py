"""The law of a session, rule by rule, on sessions by hand: each breach names both actions and what is missing."""

import pickle
from itertools import pairwise

import pytest
from attrs import evolve

from mla_fx.effects import (
    Capture,
    Drop,
    Fill,
    LawError,
    Member,
    Read,
    Record,
    Release,
    Replay,
    Reserve,
    Run,
    Session,
    Update,
    Wait,
    check_session,
    every_order,
    in_turn,
    schedule,
    session_violations,
    trace,
    turn,
)
from mla_fx.effects.step import bind
from tests.effects import toys
from tests.effects.sessions import (
    BIG,
    BIG_TURN,
    EAGER,
    FAULTS,
    RESERVE,
    SHARED,
    SMALL,
    SMALL_TURN,
    filled,
    member,
    session,
)

BOTH = (RESERVE, Capture("big"), Capture("small"))
EAGER_TURN = turn(EAGER, captured=False)


def rules(*actions, members=(BIG, SMALL, EAGER)):
    return [one.rule for one in session_violations(session(*actions, members=members))]


def one(*actions, members=(BIG, SMALL, EAGER)):
    """The one breach of a session."""
    (found,) = session_violations(session(*actions, members=members))
    return found


# --- the value ---------------------------------------------------------------------


def test_a_session_prints_like_a_program():
    actions = (Reserve("workspace", 64), Capture("big"), *BIG_TURN, Run("eager"), Drop("eager.out"), Release("big"))
    assert str(session(*actions, members=(BIG, EAGER))) == "\n".join(
        [
            "session",
            "  big: decode    pool graphs, asks 64 of workspace",
            "  eager: decode    asks 64 of workspace",
            "  one memory: big.cache eager.cache",
            "host    reserve workspace 64",
            "host    capture big",
            "main    record ready",
            "update  wait ready",
            "update  update big.hist",
            "main    fill big",
            "main    replay big",
            "main    read big.out",
            "main    read big.cache_1",
            "main    run eager",
            "host    drop eager.out",
            "host    release big",
        ]
    )
    taking = Fill("big", takes=(("x", "eager.out"),))
    assert str(taking) == "fill big    x from eager.out"


def test_a_session_is_a_value():
    ours = session(*BOTH, *BIG_TURN)
    assert pickle.loads(pickle.dumps(ours)) == ours == session(*BOTH, *BIG_TURN)
    assert ours != session(*BOTH, *SMALL_TURN)
    assert len({ours, session(*BOTH, *BIG_TURN)}) == 1


def test_an_operand_on_the_host_that_is_not_fixed_makes_a_launch_updatable():
    fixed = evolve(BIG, program=BIG.program.with_fixed({"lengths": (1, 1)}))
    assert Update("big", "hist") in turn(BIG, captured=True)
    assert not [action for action in turn(fixed, captured=True) if isinstance(action, Update)]
    check_session(session(RESERVE, Capture("big"), *in_turn([turn(fixed, captured=True)] * 2), members=(fixed,)))
    assert rules(RESERVE, Capture("big"), *BIG_TURN, members=(fixed,)) == [9]


@pytest.mark.parametrize("size", range(6))
def test_every_order_has_each_turn_behind_each(size):
    turns = [(Reserve(str(k), k), Read(str(k), "x")) for k in range(size)]
    actions = every_order(turns)
    order = [action.size for action in actions if isinstance(action, Reserve)]
    pairs = list(pairwise(order))
    assert sorted(pairs) == [(a, b) for a in range(size) for b in range(size)]
    assert len(actions) == 2 * len(order)
    assert len(order) == (size**2 + 1 if size else 0)


@pytest.mark.parametrize("known", range(5))
def test_pairs_that_are_known_are_left_out(known):
    turns = [(Reserve(str(k), k),) for k in range(4)]
    order = [action.size for action in every_order(turns, known=known) if isinstance(action, Reserve)]
    wanted = {(a, b) for a in range(4) for b in range(4) if max(a, b) >= known}
    assert {pair for pair in pairwise(order) if pair in wanted} == wanted
    assert not any(max(pair) < known for pair in pairwise(order))


def test_every_turn_has_events_of_its_own():
    events = [action.event for action in every_order([BIG_TURN, SMALL_TURN]) if isinstance(action, Record)]
    assert len(set(events)) == len(events) == 5


# --- what is legal -----------------------------------------------------------------


def test_captured_and_eager_programs_in_any_order():
    check_session(session(*BOTH, *every_order([BIG_TURN, SMALL_TURN, EAGER_TURN])))


def test_captured_later_captured_again_and_dropped():
    check_session(
        session(
            *in_turn(
                [
                    *((RESERVE, Capture("big")), BIG_TURN, (Capture("small"),), SMALL_TURN, BIG_TURN),
                    *((Drop("big.out"), Release("big")), SMALL_TURN, (Capture("big"),), BIG_TURN),
                    *((Release("small"),), BIG_TURN),
                ]
            )
        )
    )


def test_an_output_is_handed_on():
    """Through a copy into static inputs, and as it lies, to a run."""
    check_session(
        session(
            *(*BOTH, *BIG_TURN, Update("small", "hist"), Fill("small", takes=(("x", "big.out"),)), Replay("small")),
            *(Read("small", "out"), Run("eager", takes=(("x", "small.out"),)), Read("eager", "out")),
        )
    )


def test_the_first_captured_keeps_its_outputs_while_others_are_replayed():
    """What is captured later never gets the outputs of what is captured before."""
    check_session(session(*BOTH, *BIG_TURN[:-2], *SMALL_TURN[2:], Read("big", "out")))


# --- the public faults -------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTS)
def test_a_public_fault_is_refused_by_its_rule(name):
    fault = FAULTS[name]
    found = session_violations(fault.broken)
    assert {violation.rule for violation in found} == {fault.rule}
    assert all(violation.order and "; missing" in violation.message for violation in found)
    check_session(fault.mended)


def test_what_is_said_of_the_public_faults():
    assert {name: str(session_violations(fault.broken)[0]) for name, fault in FAULTS.items()} == {
        "exchange buffers freed after capture": "rule 10: replay big [9] uses 'workspace' as it was before "
        "capture big [1], and run eager [2] has made it grow; missing: reserve workspace 128 before capture big [1]",
        "exchange buffers in no pool": "rule 7: replay big [6] uses memory that is anybody's since "
        "capture big [1], all but that of its outputs; missing: a pool",
        "graphs that recycle staging memory": "rule 7: replay big [8] takes static inputs from 'staging', which holds "
        "those of fill small [7]; missing: fill big",
        "graphs that recycle outputs": "rule 8: read small.out [9] takes small.out of replay small [5], and "
        "replay big [8] may have written that memory of pool 'graphs'; missing order: read small.out [9] -> "
        "replay big [8]",
        "workspace keyed by stream": "rule 10: replay big [6] uses 'workspace' as it was before capture big [1], and "
        "capture big [1] has made it grow; missing: reserve workspace 64 before capture big [1]",
        "forgotten task update": "rule 9: replay big [10] runs hist, and nothing has set its operands on the host "
        "since replay big [6]; missing: update big.hist",
        "branch on empty shards": "rule 11: big: asks (query) waits for the host, between begin and end of a capture; "
        "missing: one that does not",
    }


# --- rule by rule ------------------------------------------------------------------


def test_a_program_of_a_session_is_held_to_its_own_law():
    late = next(k for k, effect in enumerate(BIG.program.effects) if isinstance(effect, Wait))
    broken = evolve(EAGER, program=EAGER.program.without(late))
    found = session_violations(session(*EAGER_TURN, members=(broken,)))
    assert found and all(violation.message.startswith("eager: ") for violation in found)


def test_2_programs_that_share_a_state_or_a_workspace_are_ordered():
    aside = (Record("main", "filled"), Wait("other", "filled"), Replay("small", "other"))
    found = session_violations(session(*BOTH, *filled("big"), *filled("small"), *aside, Replay("big")))
    assert [violation.rule for violation in found] == [2, 2, 6, 8]
    assert str(found[0]).endswith(
        "replay small [9] and replay big [10] share state 'big.cache'; missing order: replay small [9] -> "
        "replay big [10]"
    )
    joined = (*aside, Record("other", "done"), Wait("main", "done"), Replay("big"))
    check_session(session(*BOTH, *filled("big"), *filled("small"), *joined))


def test_2_a_state_that_is_read_is_the_last():
    found = one(*BOTH, *BIG_TURN, *SMALL_TURN[2:], Read("big", "cache_1"))
    assert found.rule == 2 and "which replay small" in found.message


def test_2_a_fill_does_not_take_what_lies_where_it_writes():
    program = schedule(toys.step_of(lambda x: bind(toys.Peek(1), x), "x"), lambda equation: "main")
    viewing = Member("a", program, pool="graphs")
    actions = (Capture("a"), Fill("a"), Replay("a"), Fill("a", takes=(("x", "a.view"),)))
    (found,) = session_violations(Session((viewing,), actions))
    assert found.rule == 2 and "missing: a copy" in found.message


def test_4_events_of_a_session():
    assert rules(Record("main", "e")) == [4]
    assert rules(Wait("main", "e")) == [4]
    assert rules(Record("main", "e"), Record("main", "e"), Wait("update", "e")) == [4]


def test_7_what_has_been_let_go_of_is_not_used():
    assert rules(*BOTH, *BIG_TURN, Drop("big.out"), Read("big", "out")) == [7]
    assert rules(RESERVE, Capture("big"), *filled("big"), Drop("big.x"), Replay("big")) == [7]
    released = session_violations(session(*BOTH, *BIG_TURN, Release("big"), Replay("big"), Read("big", "out")))
    assert [violation.rule for violation in released] == [7, 7]


def test_7_a_run_over_the_pool_of_a_capture():
    """It may have its outputs where the capture has passing values; those of the capture are its own."""
    inside = evolve(EAGER, pool="graphs")
    late = (RESERVE, Capture("big"), Run("eager"), *BIG_TURN)
    assert one(*late, Read("eager", "out"), members=(BIG, inside)).rule == 7
    check_session(session(*late, Run("eager"), Read("eager", "out"), members=(BIG, inside)))
    early = (RESERVE, Run("eager"), Capture("big"), *BIG_TURN[:-2], Run("eager"))
    check_session(session(*early, Read("big", "out"), members=(BIG, inside)))


def test_8_replays_over_one_pool_do_not_overlap():
    programs = [schedule(toys.step_of(lambda x, salt=salt: bind(toys.One(salt + 2), *bind(toys.One(salt), x)), "x"),
                         lambda equation: "main") for salt in (1, 11)]  # fmt: skip
    left, right = (Member(name, program, pool="graphs") for name, program in zip("ab", programs, strict=True))

    def overlapping(*members):
        aside = (Fill("a"), Fill("b"), Record("main", "e"), Wait("other", "e"), Replay("a", "other"), Replay("b"))
        return Session(members, (Capture("a"), Capture("b"), *aside))

    (found,) = session_violations(overlapping(left, right))
    assert found.rule == 8 and "one memory of pool 'graphs'" in found.message
    check_session(overlapping(left, evolve(right, pool="others")))


def test_8_a_program_is_not_replayed_beside_itself():
    aside = (Record("main", "e"), Wait("other", "e"), Replay("big", "other"))
    assert 8 in rules(RESERVE, Capture("big"), *filled("big"), *aside, Update("big", "hist"), Replay("big"))


@pytest.mark.parametrize(
    "actions",
    [
        (Fill("big"), Replay("big")),
        (Update("big", "hist"), Update("big", "hist"), Fill("big"), Replay("big")),
        (Update("small", "hist"),),
        (Update("big", "out"),),
        (Update("big", "hist"), Fill("big"), Replay("big"), Update("big", "hist"), Replay("big")),
    ],
    ids=["missed", "twice", "of no capture", "of no lengths", "before the replay before it"],
)
def test_9_every_launch_is_updated_once_before_each_replay(actions):
    assert rules(RESERVE, Capture("big"), *actions, members=(BIG, SMALL)) == [9]


def test_10_a_buffer_does_not_grow_while_a_capture_has_it():
    more = Reserve("workspace", 65)
    assert rules(RESERVE, Capture("big"), more, *BIG_TURN) == [10]
    check_session(session(RESERVE, Capture("big"), more, Release("big"), Capture("big"), *BIG_TURN))
    staged = evolve(SMALL, staging="staging", room=(*SMALL.room, ("staging", 16)))
    grown = (RESERVE, Reserve("staging", 16), Capture("small"), Reserve("staging", 17), *SMALL_TURN)
    assert rules(*grown, members=(staged,)) == [10]


def test_11_streams_have_joined():
    aside = toys.step_of(lambda x: bind(toys.One(3), *bind(toys.One(1), x)), "x")
    program = schedule(aside, toys.placed({1: "side"}))
    unjoined = evolve(program, effects=tuple(e for e in program.effects if not isinstance(e, Wait | Record)))
    found = session_violations(Session((Member("a", unjoined, pool="graphs"),), (Capture("a"),)))
    assert 11 in [violation.rule for violation in found] and 5 not in [violation.rule for violation in found]


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        ((Capture("none"),), "must name a member: got none"),
        ((Capture("big"), Capture("big")), "it is; name its program a second time"),
        ((Capture("big"), Run("big")), "it is; name its program a second time"),
        ((Replay("big"),), "must be of a member that is captured: got big"),
        ((Read("big", "hist"),), "must read an output of big: got hist"),
        ((Drop("big.hist"),), "must let go of an output, or of a static input in a buffer of its own"),
        ((Run("eager", takes=(("cache", "big.out"),)),), "must take data inputs of eager: got cache"),
        ((Run("eager", takes=(("x", "big.hist"),)),), "must take outputs of members: got big.hist"),
    ],
)
def test_0_names_are_there(actions, text):
    found = session_violations(session(RESERVE, *actions))
    assert [violation.rule for violation in found] == [0] and text in found[0].message and not found[0].order


def test_0_members_and_shared_memory():
    def said(members, shared=()):
        return [str(violation) for violation in session_violations(Session(members, (), shared))]

    assert said((BIG, BIG)) == ["rule 0: members: each must have an identifier of its own as name: got 'big'"]
    assert said((evolve(BIG, name="a.b"),)) == [
        "rule 0: members: each must have an identifier of its own as name: got 'a.b'"
    ]
    assert said((BIG,), (("big.none",),)) == [
        "rule 0: shared: must name inputs of members, each once, and one of each: got big.none"
    ]
    assert said((BIG, SMALL), (*SHARED[:0], ("big.cache", "small.x"), ("big.cache",))) == [
        "rule 0: shared: must name inputs of members, each once, and one of each: got big.cache"
    ]
    assert said((BIG, SMALL), (("big.cache", "small.lengths"),)) == [
        "rule 0: shared: one memory must have one shape, dtype and place: got big.cache small.lengths"
    ]


def test_1_inputs_are_filled_and_outputs_given():
    assert one(RESERVE, Capture("big"), Update("big", "hist"), Replay("big")).rule == 1
    assert one(RESERVE, Capture("big"), Read("big", "out")).rule == 1


def test_all_that_is_wrong_is_in_the_error():
    with pytest.raises(LawError, match="rule 9") as raised:
        check_session(FAULTS["forgotten task update"].broken)
    assert pickle.loads(pickle.dumps(raised.value)).violations == raised.value.violations


def test_what_waits_may_run_eagerly():
    check_session(session(*turn(member("eager", asks=toys.Asks, pool=""), captured=False), members=(EAGER,)))


def test_staged_inputs_are_static():
    """What a run stages, a fill brings to a captured program, whose graph has no copy."""
    from mla_fx.effects import staged

    def compute(x, tokens):
        return bind(toys.Two(1), x, tokens)

    program = schedule(trace(compute, "toy", x=toys.X, tokens=staged(toys.X)), lambda equation: "main")
    one = Member("a", program, pool="graphs")
    check_session(Session((one,), (Capture("a"), *every_order([turn(one, captured=True)]))))
    (found,) = session_violations(Session((one,), (Capture("a"), Replay("a"))))
    assert str(found) == "rule 1: replay a [1] takes static inputs; missing: fill a"


# --- pairs are enough --------------------------------------------------------------
