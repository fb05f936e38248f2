"""Faults that are planted, one at a time, in the scheduler and in the law, and are seen by the properties of the law.

A fault of the scheduler is seen by the law, and with the law out of the way by
the hostile machine and by the judge.  A fault of the law is seen where it
accepts a program that goes wrong.  Every fault has an example, the least step
and orchestration that show it, on which all properties hold without it.  That
random steps reach the faults too is shown in a soak run.
"""

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mla_fx.effects import Equation, Keep, Launch, LawError, Op, Program, Step, Value, Wait, bind, schedule, trace
from mla_fx.effects import check as law
from tests.effects import toys
from tests.effects.judge import Judge
from tests.effects.test_judge import agree
from tests.effects.test_law_teeth import (
    earlier_drops,
    lent,
    mutants,
    no_drop_can_be_earlier,
    quick,
    serial,
    verdict_holds,
)
from tests.effects.toys import ALONE, DCP, TP, Exchange, One, Peek, Room, Scratch, Two, Update, X, placed

#: The modules, which the functions of their names hide in the package.
SCHEDULER, LAW = (import_module(f"mla_fx.effects.{name}") for name in ("schedule", "check"))
PLAN, BEFORE, CHECKER = SCHEDULER._Plan, SCHEDULER._Before, LAW._Checker
Fault = Callable[[pytest.MonkeyPatch], None]
Example = tuple[Step, Callable[[Equation], str]]

# --- examples --------------------------------------------------------------------


def example(*calls: tuple[str, str, Op, str]) -> Example:
    """A step and its streams from (stream, results, op, operands); every result that nothing takes is an output."""

    def compute(x: Value) -> list[Value]:
        values = {"x": x}
        for _, result, op, operands in calls:
            values.update(zip(result.split(), bind(op, *(values[name] for name in operands.split())), strict=True))
        taken = {name for *_, operands in calls for name in operands.split()}
        return [value for name, value in values.items() if name not in taken]

    return trace(compute, "toy", x=X), placed({op.salt: stream for stream, _, op, _ in calls})


def twice(first: Op, second: Op) -> Example:
    """Two launches that no value orders, the second on a stream that has its inputs and joins in any case."""
    return example(("side", "a", One(5), "x"), ("main", "b", first, "x"), ("side", "c", second, "a"))


ONE_GROUP, TWO_GROUPS = twice(Exchange(1, DCP), Exchange(3, DCP)), twice(Exchange(1, DCP), Exchange(3, TP))
WORKSPACE, ROOM = twice(Scratch(1), Scratch(3)), twice(Room(1), Room(3))
#: Main takes what two streams make, and waits for each.
TWO_SOURCES = example(("side", "a", One(1), "x"), ("comm", "b", One(3), "x"), ("main", "c", Two(5), "a b"))
#: Main sees one use of v with c, the other only with d.
TWO_USES = example(
    ("main", "v", One(1), "x"),
    *(("side", "a", One(3), "v"), ("comm", "b", One(5), "v")),
    *(("main", "c", One(7), "a"), ("main", "d", One(9), "b")),
)
#: Main goes on while side still uses v.
ONE_KEEP = example(("main", "v", One(1), "x"), ("side", "a", One(3), "v"), ("main", "b", One(5), "x"))
#: Main goes on while side and comm still use v.
TWO_KEEPS = example(
    ("main", "v", One(1), "x"),
    *(("side", "a", One(3), "v"), ("comm", "b", One(5), "v")),
    ("main", "c", One(7), "x"),
)
#: As above, and behind the drop side waits for the use on comm.
SEES_LATER = example(
    ("main", "v", One(1), "x"),
    *(("side", "a", One(3), "v"), ("comm", "b", One(5), "v"), ("side", "c", Two(7), "a b")),
    ("main", "d", One(9), "x"),
)
#: What main returns is made elsewhere.
ASIDE = example(("side", "a", One(1), "x"))

#: Two collectives of a group that goes on beside all others.
ONE_ALONE = twice(Exchange(1, ALONE), Exchange(3, ALONE))
#: Main goes on while side uses a view of v.
VIEW = example(
    ("main", "v", One(1), "x"),
    *(("main", "w m", Peek(3), "v"), ("side", "a", One(5), "w"), ("main", "b", One(7), "x")),
)
#: Side has v, and comm a view of it.
VIEW_FIRST = example(
    ("side", "v", One(1), "x"),
    *(("side", "w m", Peek(3), "v"), ("comm", "a", One(5), "w"), ("main", "b", Two(7), "m a")),
)
#: Side reads v, and main writes it through a view.
VIEW_WRITTEN = example(
    ("main", "v", One(1), "x"),
    *(("side", "a", One(3), "v"), ("main", "w m", Peek(5), "v"), ("main", "u", Update(7), "w x")),
)

# --- what is asked of them -------------------------------------------------------


def legal(step: Step, streams: Any) -> None:
    law(schedule(step, streams))


def as_written(step: Step) -> Program:
    """One equation after the other on one stream, which nobody has scheduled."""
    effects = tuple(Launch("main", e.op, e.operands, e.results, e.tag) for e in step.equations)
    return Program(step.inputs, step.outputs, effects, tree=step.tree)


def right_unchecked(step: Step, streams: Any) -> None:
    toys.right(schedule(step, streams), toys.run(as_written(step)), range(12))


def right_by_judge(step: Step, streams: Any) -> None:
    program = schedule(step, streams)
    verdict = Judge(program).verdict()
    assert not verdict, f"goes wrong: {verdict}\n{program}"


def lesser(program: Program) -> Iterator[Program]:
    """Without one wait or keep, or with a drop that is too early."""
    for index, effect in enumerate(program.effects):
        if isinstance(effect, Wait | Keep):
            yield toys.without_idle_records(program.without(index))
    for _, earlier in earlier_drops(program):
        yield earlier


def machine_agrees(step: Step, streams: Any) -> None:
    for less in lesser(schedule(step, streams)):
        verdict_holds(serial(step), less)


def judge_agrees(step: Step, streams: Any) -> None:
    for less in lesser(schedule(step, streams)):
        agree(less)


def said(check: Callable[..., Any], *arguments: Any) -> str | None:
    """What a property says where it fails; None where it holds."""
    try:
        check(*arguments)
    except (AssertionError, LawError) as error:
        return str(error)
    return None


def seen(check: Callable[..., Any], pairs: Any, examples: int) -> str | None:
    """What a property says of the first random example that it fails on."""
    once = settings(quick, phases=[Phase.generate], max_examples=examples, report_multiple_bugs=False)

    def holds(pair: tuple[Any, Any]) -> None:
        check(*pair)

    return said(once(given(pairs)(holds)))


#: Little but collectives, and little but users of workspaces: what no value orders.
MEETINGS, ROOMS = (One, Two, Exchange, Exchange), (One, Two, Scratch, Scratch, Room, Room)
#: What random properties draw: a step and its streams.
RANDOM = st.one_of(
    *(st.tuples(toys.steps(kinds=kinds), toys.orchestrations()) for kinds in ((), toys.CALM, MEETINGS, ROOMS)),
    lent(),
)
#: As much as the judge plays all interleavings of.
SMALL = st.one_of(
    *(st.tuples(toys.steps(5, kinds), toys.orchestrations(3)) for kinds in ((), toys.CALM, MEETINGS, ROOMS))
)

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


def unasked_across_groups(patch: pytest.MonkeyPatch) -> None:
    """Collectives are ordered within their group alone."""
    needs = PLAN._needs

    def fewer(self: Any) -> Iterator[dict[int, list[str]]]:
        for j, need in enumerate(needs(self)):
            other = {i for i, why in need.items() if why == ["collectives"] and group(self, i) != group(self, j)}
            yield {i: why for i, why in need.items() if i not in other}

    def group(plan: Any, index: int) -> object:
        return plan.launches[index].op.group_of()

    patch.setattr(PLAN, "_needs", fewer)


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


def a_view_has_memory_of_its_own(patch: pytest.MonkeyPatch) -> None:
    plain = SCHEDULER.memory_of

    def memory(inputs: Any, equations: Any) -> dict[str, str]:
        root = plain(inputs, equations)
        views = (e.results[result] for e in equations for result in e.op.viewed())
        return {**root, **{name: name for name in views}}

    patch.setattr(SCHEDULER, "memory_of", memory)


def a_view_is_there_from_the_start(patch: pytest.MonkeyPatch) -> None:
    """Nobody who takes a view waits for what it is a view of."""
    needs = PLAN._needs

    def fewer(self: Any) -> Iterator[dict[int, list[str]]]:
        for need in needs(self):
            views = {name for name in self.root if name.startswith("view")}
            yield {i: left for i, why in need.items() if (left := [word for word in why if word not in views])}

    patch.setattr(PLAN, "_needs", fewer)


IN_THE_SCHEDULER: dict[str, tuple[Fault, Example]] = {
    "collectives on two streams": (unasked("collectives"), ONE_GROUP),
    "collectives of two groups on two streams": (unasked_across_groups, TWO_GROUPS),
    "users of a workspace on two streams": (unasked("workspace"), WORKSPACE),
    "users of the other workspace on two streams": (unasked("room"), ROOM),
    "a wait brings all that was issued": (a_wait_brings_all_that_was_issued, TWO_SOURCES),
    "a drop behind a wait for one of several uses": (a_drop_behind_a_wait_for_one_of_several_uses, TWO_USES),
    "the last keep is lost": (the_last_keep_is_lost, ONE_KEEP),
    "a keep for the last use alone": (a_keep_for_the_last_use_alone, TWO_KEEPS),
    "no stream joins": (no_stream_joins, ASIDE),
    "collectives of an independent group on two streams": (unasked("collectives"), ONE_ALONE),
    "a view has memory of its own": (a_view_has_memory_of_its_own, VIEW),
    "a view that is written has memory of its own": (a_view_has_memory_of_its_own, VIEW_WRITTEN),
    "a view is there from the start": (a_view_is_there_from_the_start, VIEW_FIRST),
}


@pytest.mark.parametrize("fault", IN_THE_SCHEDULER)
def test_a_fault_of_the_scheduler_is_seen(monkeypatch, fault):
    plant, shown = IN_THE_SCHEDULER[fault]
    assert [said(check, *shown) for check in (legal, right_unchecked, right_by_judge)] == [None] * 3
    plant(monkeypatch)
    assert (said(legal, *shown) or "").startswith("rule "), "the law sees nothing"
    assert (said(right_unchecked, *shown) or "").startswith("wrong under seed "), "the machine sees nothing"
    assert (said(right_by_judge, *shown) or "").startswith("goes wrong: "), "the judge sees nothing"


@pytest.mark.soak
@pytest.mark.parametrize("fault", IN_THE_SCHEDULER)
def test_random_steps_reach_a_fault_of_the_scheduler(monkeypatch, fault):
    IN_THE_SCHEDULER[fault][0](monkeypatch)
    by_law = seen(legal, RANDOM, examples=3000)
    assert by_law is not None and by_law.startswith("rule "), "the law sees nothing"
    by_machine = seen(right_unchecked, RANDOM, examples=2000)
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
    law.collectives.clear()


def forget_other_groups(law: Any, launch: Any, *_: Any) -> None:
    last = law.collectives.get(None)
    if last is not None and last.launch.op.group_of() != launch.op.group_of():
        law.collectives.clear()


def forget(workspace: str) -> Callable[..., None]:
    return lambda law, *_: law.workspaces.pop(workspace, None)


def forget_what_has_to_join(law: Any, *_: Any) -> None:
    law.last.clear()
    law.waiting.clear()


def forget_what_is_used_once_ordered(law: Any, launch: Any, use: Any) -> None:
    """A launch behind one use on another stream counts as behind all."""
    law.free[launch.stream] = [
        block
        for block in law.free[launch.stream]
        if not any(reader.before(use) for reader in block.uses if reader.launch.stream != launch.stream)
    ]


def cover_with(clocks: Callable[[Any, Any], list[Any]]) -> Fault:
    def cover(law: Any, drop: Any) -> None:
        if (block := law.memory.get(drop.value)) is not None:  # what nothing produces is a breach already
            block.covered = clocks(law, block)

    return around("drop", nothing, cover)


def see_everything(law: Any, wait: Any) -> None:
    for clock in list(law.clocks.values()):
        for stream, tick in clock.items():
            law.clock(wait.stream)[stream] = max(law.clock(wait.stream).get(stream, 0), tick)


def a_view_apart(law: Any, launch: Any, use: Any, *_: Any) -> None:
    """A view is taken for memory of its own."""
    for result in launch.op.viewed():
        name = launch.results[result]
        law.memory[name] = LAW._Memory(name, law.shown.get(name, name), home=launch.stream, uses={use: None})


def a_view_without_a_producer(law: Any, launch: Any, *_: Any) -> None:
    for result in launch.op.viewed():
        law.shown[launch.results[result]] = law.memory[launch.results[result]].newest = launch.results[result]


IN_THE_LAW: dict[str, tuple[Fault, Example]] = {
    "collectives on two streams": (around("shared", forget_the_collective), ONE_GROUP),
    "collectives of two groups on two streams": (around("shared", forget_other_groups), TWO_GROUPS),
    "users of a workspace on two streams": (around("shared", forget("workspace")), WORKSPACE),
    "users of the other workspace on two streams": (around("shared", forget("room")), ROOM),
    "a drop behind a wait for one of several uses": (around("reuse", forget_what_is_used_once_ordered), TWO_USES),
    "a needed keep is lost": (cover_with(lambda law, block: [_All()]), ONE_KEEP),
    "any keep is enough": (cover_with(lambda law, block: [_All()] if block.kept else []), TWO_KEEPS),
    "a keep covers what its stream sees later": (
        cover_with(lambda law, block: [law.clock(s) for s in block.kept]),
        SEES_LATER,
    ),
    "a wait brings all that was issued": (around("wait", nothing, see_everything), TWO_SOURCES),
    "no stream has to join": (around("end", forget_what_has_to_join), ASIDE),
    "collectives of an independent group on two streams": (around("shared", forget_the_collective), ONE_ALONE),
    "a view has memory of its own": (around("results", nothing, a_view_apart), VIEW),
    "a view is there from the start": (around("results", nothing, a_view_without_a_producer), VIEW_FIRST),
}


@pytest.mark.parametrize("fault", IN_THE_LAW)
def test_a_fault_of_the_law_is_seen(monkeypatch, fault):
    plant, shown = IN_THE_LAW[fault]
    less = [*lesser(schedule(*shown))]
    assert less and {verdict_holds(serial(shown[0]), one) for one in less} == {"refused"}
    assert {agree(one) for one in less} == {"wrong"}
    plant(monkeypatch)
    assert (said(machine_agrees, *shown) or "").startswith("wrong under seed "), "the machine sees nothing"
    assert (said(judge_agrees, *shown) or "").startswith("accepted, and goes wrong"), "the judge sees nothing"


def judged(_: Program, mutant: Program) -> None:
    agree(mutant)


@pytest.mark.soak
@pytest.mark.parametrize("fault", IN_THE_LAW)
def test_random_steps_reach_a_fault_of_the_law(monkeypatch, fault):
    IN_THE_LAW[fault][0](monkeypatch)
    found = (
        seen(machine_agrees, RANDOM, examples=400)
        or seen(no_drop_can_be_earlier, lent(), examples=400)
        or seen(verdict_holds, mutants(), examples=2000)
    )
    assert found is not None, "no property sees it"
    assert found.startswith(("accepted: ", "wrong under seed ")), found
    by_judge = (
        seen(judge_agrees, SMALL, examples=400)
        or seen(judge_agrees, lent(1, 2), examples=200)
        or seen(judged, mutants(6, 3), examples=4000)
    )
    assert by_judge is not None and by_judge.startswith("accepted, and goes wrong"), "the judge sees nothing"


@pytest.mark.soak
def test_nothing_is_seen_without_a_fault():
    """What the soak runs above take for a sight is the fault's doing: the same examples are well without it."""
    for check in (legal, right_unchecked, machine_agrees):
        assert seen(check, RANDOM, examples=20) is None
    assert seen(no_drop_can_be_earlier, lent(), examples=20) is None
