"""Faults that are planted, one at a time, in the scheduler and in the law, and are seen by the properties of the law.

A fault of the scheduler is seen by the law, and with the law out of the way by
the hostile machine.  A fault of the law is seen where it accepts a program
that goes wrong, or lets something needed go.  The properties run on random
steps as they always do: a fault that none of them showed would mean that these
steps do not reach it.
"""

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mla_fx.effects import LawError, schedule
from mla_fx.effects import check as law
from tests.effects import toys
from tests.effects.test_judge import agree
from tests.effects.test_law_teeth import (
    legal_and_right,
    mutants,
    no_drop_can_be_earlier,
    nothing_can_be_left_out,
    quick,
    serial,
    verdict_holds,
)

#: The modules, which the functions of their names hide in the package.
SCHEDULER, LAW = (import_module(f"mla_fx.effects.{name}") for name in ("schedule", "check"))
PLAN, BEFORE, CHECKER = SCHEDULER._Plan, SCHEDULER._Before, LAW._Checker
Fault = Callable[[pytest.MonkeyPatch], None]


def seen(check: Callable[..., Any], *strategies: Any, examples: int = 600) -> str | None:
    """What a property says of the first random example that it fails on; None where it fails on none."""
    once = settings(quick, phases=[Phase.generate], max_examples=examples, report_multiple_bugs=False)

    def holds(drawn: tuple[Any, ...]) -> None:
        check(*drawn)

    try:
        once(given(st.tuples(*strategies))(holds))()
    except (AssertionError, LawError) as error:
        return str(error)
    return None


# --- in the scheduler ------------------------------------------------------------


def unasked(reason: str) -> Fault:
    """No order is asked for this reason."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        needs = PLAN._needs

        def fewer(self: Any) -> Iterator[dict[int, list[str]]]:
            for need in needs(self):
                yield {i: left for i, why in need.items() if (left := [word for word in why if word != reason])}

        patch.setattr(PLAN, "_needs", fewer)

    return plant


def a_wait_brings_all_that_was_issued(patch: pytest.MonkeyPatch) -> None:
    def joined(self: Any, other: Any, launch: int) -> Any:
        return BEFORE(self.streams, {s: max(launch, self.last.get(s, -2)) for s in ("main", *self.streams)})

    patch.setattr(BEFORE, "joined", joined)


def a_drop_behind_a_wait_for_one_of_several_uses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BEFORE, "has_all", lambda self, launches: any(map(self.has, launches)))


def the_last_keep_is_lost(patch: pytest.MonkeyPatch) -> None:
    cover = PLAN._cover
    patch.setattr(PLAN, "_cover", lambda self, racing, last: cover(self, racing, last)[:-1])


def a_keep_for_the_last_use_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PLAN, "_cover", lambda self, racing, last: (self.launches[racing[-1]].stream,))


def no_stream_joins(patch: pytest.MonkeyPatch) -> None:
    needs = PLAN._needs
    patch.setattr(PLAN, "_needs", lambda self: [*list(needs(self))[:-1], {}])


IN_THE_SCHEDULER: dict[str, Fault] = {
    "collectives on two streams": unasked("collectives"),
    "users of a workspace on two streams": unasked("workspace"),
    "users of the other workspace on two streams": unasked("room"),
    "a wait brings all that was issued": a_wait_brings_all_that_was_issued,
    "a drop behind a wait for one of several uses": a_drop_behind_a_wait_for_one_of_several_uses,
    "the last keep is lost": the_last_keep_is_lost,
    "a keep for the last use alone": a_keep_for_the_last_use_alone,
    "no stream joins": no_stream_joins,
}


def legal(step: Any, streams: Any) -> None:
    law(schedule(step, streams))


def right_unchecked(step: Any, streams: Any) -> None:
    toys.right(schedule(step, streams), toys.run(serial(step)), range(12))


@pytest.mark.parametrize("fault", IN_THE_SCHEDULER)
def test_a_fault_of_the_scheduler_is_seen(monkeypatch, fault):
    IN_THE_SCHEDULER[fault](monkeypatch)
    by_law = seen(legal, toys.steps(), toys.orchestrations(), examples=1000)
    assert by_law is not None and by_law.startswith("rule "), "the law sees nothing"
    by_machine = seen(right_unchecked, toys.steps(), toys.orchestrations())
    assert by_machine is not None and by_machine.startswith("wrong under seed "), "the machine sees nothing"


# --- in the law ------------------------------------------------------------------


class _All(dict[str, float]):
    """A clock that has seen everything."""

    def get(self, key: Any, default: Any = None) -> Any:
        return math.inf


def around(method: str, before: Callable[..., None], after: Callable[..., None] = lambda *_: None) -> Fault:
    """Something done before and after a method of the checker."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        plain = getattr(CHECKER, method)

        def planted(self: Any, *arguments: Any) -> None:
            before(self, *arguments)
            plain(self, *arguments)
            after(self, *arguments)

        patch.setattr(CHECKER, method, planted)

    return plant


def nothing(*_: Any) -> None:
    pass


def forget_the_collective(law: Any, *_: Any) -> None:
    law.collective = None


def forget_other_groups(law: Any, launch: Any, *_: Any) -> None:
    if law.collective is not None and law.collective.launch.op.group_of() != launch.op.group_of():
        law.collective = None


def forget_the_room(law: Any, *_: Any) -> None:
    law.workspaces.pop("room", None)


def forget_what_is_used_once_ordered(law: Any, launch: Any, use: Any) -> None:
    """A launch behind one use on another stream counts as behind all."""
    law.free[launch.stream] = [
        block
        for block in law.free[launch.stream]
        if not any(reader.before(use) for reader in block.uses if reader.launch.stream != launch.stream)
    ]


def cover_with(clocks: Callable[[Any, Any], list[Any]]) -> Fault:
    def cover(law: Any, drop: Any) -> None:
        law.memory[drop.value].covered = clocks(law, law.memory[drop.value])

    return around("drop", nothing, cover)


def see_everything(law: Any, wait: Any) -> None:
    for clock in list(law.clocks.values()):
        for stream, tick in clock.items():
            law.clock(wait.stream)[stream] = max(law.clock(wait.stream).get(stream, 0), tick)


IN_THE_LAW: dict[str, Fault] = {
    "collectives on two streams": around("shared", forget_the_collective),
    "collectives of two groups on two streams": around("shared", forget_other_groups),
    "users of the other workspace on two streams": around("shared", forget_the_room),
    "a drop behind a wait for one of several uses": around("reuse", forget_what_is_used_once_ordered),
    "a needed keep is lost": cover_with(lambda law, block: [_All()]),
    "any keep is enough": cover_with(lambda law, block: [_All()] if block.kept else []),
    "a keep covers what its stream sees later": cover_with(lambda law, block: [law.clock(s) for s in block.kept]),
    "a wait brings all that was issued": around("wait", nothing, see_everything),
}


def verdict(pair: Any) -> None:
    verdict_holds(*pair)


def judged(pair: Any) -> None:
    agree(pair[1])


@pytest.mark.parametrize("fault", IN_THE_LAW)
def test_a_fault_of_the_law_is_seen(monkeypatch, fault):
    IN_THE_LAW[fault](monkeypatch)
    random_steps = (toys.steps(), toys.orchestrations())
    found = (
        seen(nothing_can_be_left_out, *random_steps, examples=30)
        or seen(no_drop_can_be_earlier, *random_steps, examples=100)
        or seen(verdict, mutants(), examples=600)
    )
    assert found is not None, "no property sees it"
    assert found.startswith(("accepted: ", "wrong under seed ")), found
    by_judge = seen(judged, mutants(max_calls=6, max_streams=3), examples=1000)
    assert by_judge is not None and by_judge.startswith("accepted, and goes wrong"), "the judge sees nothing"


# --- and what is not planted -----------------------------------------------------


def test_nothing_is_seen_without_a_fault():
    """What the two tests above take for a sight is the fault's doing: the same examples are well without it."""
    assert seen(legal_and_right, toys.steps(), toys.orchestrations(), examples=20) is None
    assert seen(right_unchecked, toys.steps(), toys.orchestrations(), examples=20) is None
    assert seen(no_drop_can_be_earlier, toys.steps(), toys.orchestrations(), examples=20) is None
