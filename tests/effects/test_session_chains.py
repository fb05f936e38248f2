"""The law of a session of turns in any order: each right behind each, once, stands for all orders and chains."""

from itertools import pairwise

import hypothesis
from attrs import evolve
from hypothesis import settings
from hypothesis import strategies as st

from mla_fx.effects import Capture, Fill, Record, Reserve, Session, Wait, every_order, in_turn, session_violations
from tests.effects.random_sessions import members, turns
from tests.effects.test_law_teeth import quick


@st.composite
def _turns_in_order(draw):
    """Programs, a turn of each, some without an order that they need, and a sequence of these turns."""
    given = draw(members())
    turned = [draw(turns(one, captured=True, outputs=[], shared=set())) for one in given]
    for k, actions in enumerate(turned):
        events = sorted({action.event for action in actions if isinstance(action, Record | Wait)})
        if events and draw(st.booleans()):
            gone = draw(st.sampled_from(events))
            turned[k] = [action for action in actions if getattr(action, "event", None) != gone]
    sequence = draw(st.lists(st.sampled_from(turned), min_size=4, max_size=9))
    begin = [Reserve("workspace", 64), Reserve("staging", 16)]
    begin += draw(st.permutations([Capture(one.name) for one in given]))
    return given, turned, sequence, begin


def test_what_is_legal_in_every_order_is_legal_in_any():
    """Turns that read what they make before they end: each right behind each stands for all sequences."""
    seen = []

    @settings(quick, max_examples=60)
    @hypothesis.given(_turns_in_order())
    def hold(drawn):
        given, turned, sequence, begin = drawn
        every = session_violations(Session(given, (*begin, *every_order(turned))))
        any_one = session_violations(Session(given, (*begin, *in_turn(sequence))))
        assert every or not any_one, "\n".join(map(str, any_one))
        seen.append((bool(every), bool(any_one)))

    hold()
    assert {(False, False), (True, True)} <= {*seen}


@st.composite
def _chains(draw):
    """As above, with turns that take what the turn before gives: all such pairs, and a sequence with some."""
    given, turned, _, begin = draw(_turns_in_order())
    gives, puts = {}, {}
    for k, one in enumerate(given):
        memory, inputs = one.program.memory(), {put.name: put for put in one.program.inputs}
        used = {name for launch in one.program.launches for name in launch.operands} - {*one.program.states()}
        gives.update((k, f"{one.name}.{name}") for name in one.program.outputs if memory[name] not in inputs)
        puts.update((k, name) for name, put in inputs.items() if name in used and put.place != "host")
    taking = {
        (first, second): [evolve(a, takes=((puts[second], gives[first]),)) if isinstance(a, Fill) else a for a in turn]
        for first in gives
        for second, turn in enumerate(turned)
        if second in puts
    }
    numbers = draw(st.lists(st.integers(0, len(given) - 1), min_size=4, max_size=9))
    pairs = [pair if pair in taking and draw(st.booleans()) else None for pair in pairwise(numbers)]
    sequence = [turned[numbers[0]], *(taking[p] if p else turned[n] for p, n in zip(pairs, numbers[1:], strict=True))]
    edges = [actions for (first, _), second in taking.items() for actions in (turned[first], second)]
    return given, turned, edges, sequence, begin


def test_what_may_be_taken_right_behind_each_may_be_taken_in_any_chain():
    """Turns that take what the turn before gives: each such pair once stands for all chains of them."""
    seen = []

    @settings(quick, max_examples=60)
    @hypothesis.given(_chains())
    def hold(drawn):
        given, turned, edges, sequence, begin = drawn
        each = (*begin, *every_order(turned))
        every = session_violations(Session(given, (*each, *in_turn(edges, first=len(each)))))
        any_one = session_violations(Session(given, (*begin, *in_turn(sequence))))
        assert every or not any_one, "\n".join(map(str, any_one))
        seen.append((bool(every), bool(any_one), any("from" in str(a) for turn in sequence for a in turn)))

    hold()
    assert {(False, False, True), (True, True, True)} <= {*seen}
