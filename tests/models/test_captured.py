"""Captured steps of a runner: the same texts, by which programs, padded how, and held against the law of a session."""

import re
from itertools import pairwise
from typing import Any

import pytest
from attrs import evolve

from mla_fx import Sharding, StepShape, backends, orchestrations, plan_batch
from mla_fx.backends import cuda
from mla_fx.batch import whole
from mla_fx.effects import InputError
from mla_fx.effects.check import LawError
from mla_fx.effects.check_session import check_session, session_violations
from mla_fx.effects.session import Fill, Replay, Run, Session, Update, in_turn, turn
from mla_fx.models import Checkpoint, Engine, MtpDrafter, Runner
from mla_fx.models.capture import Form, form_of, session, sizes
from mla_fx.models.runner import Piece
from tests.backends.standin import Machine
from tests.backends.standin_graphs import Graph, Graphs
from tests.models.served import oracle, random_prompts, run, small


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch, Graphs())


def runner(machine: Machine, *, ranks: int = 1, requests: int = 3, **options: Any) -> Runner:
    shape = StepShape(ranks=ranks, requests=requests, blocks=64, block_size=4, table_width=32, dtype="fp32")
    backend = machine.backend(ranks, cuda.TABLE, "cuda")
    return Runner.load(Checkpoint.open(small()), backend, shape=shape, **options)


def texts(runner: Runner, drafts: int = 0, count: int = 4) -> list[list[int]]:
    """Of requests that come and go, more than run at a time."""
    engine = Engine(runner=runner, chunk=8, drafter=MtpDrafter(runner, drafts) if drafts else None)
    asked = [engine.add(prompt, max_new_tokens=3 + 2 * k) for k, prompt in enumerate(random_prompts(count, seed=3))]
    for _ in run(engine):
        pass
    return [request.new_tokens for request in asked]


@pytest.mark.parametrize(("ranks", "drafts"), [(1, 0), pytest.param(2, 0, marks=pytest.mark.soak), (2, 2)])
def test_texts_are_those_of_the_dense_model(machine, monkeypatch, ranks, drafts):
    """With sizes that leave some decode steps eager; captured and eager steps share caches."""
    replays, replay = [], Graph.replay
    monkeypatch.setattr(Graph, "replay", lambda graph: (replays.append(graph), replay(graph)))
    made = runner(machine, ranks=ranks, mtp=drafts > 0, capture=(1, 2, 6) if drafts else (1, 2))
    right = [oracle(small()).greedy(p, 3 + 2 * k) for k, p in enumerate(random_prompts(4, seed=3))]
    assert texts(made, drafts) == right
    assert len(replays) > 5 and len(set(replays)) >= 2
    kinds = {key[0] for key in made.captures.members}
    assert kinds == {"model", "mtp"} if drafts else {"model"}


def test_the_largest_is_captured_first_and_a_step_goes_as_the_next_larger_size(machine):
    made = runner(machine, capture=(2, 1, 4))
    assert texts(made, count=3)
    forms = [key[1] for key in made.captures.members]
    assert forms == [Form(4, True), Form(2, True), Form(1, True)]
    eager = [key for key in made.programs if not isinstance(key[1], Form)]
    assert eager and all(key[-1] for key in eager)  # those that fill in prompts


def test_which_form_a_step_has():
    given = sizes([2, 8, 4, 2])
    assert given == (8, 4, 2)
    for lengths, split, form in (
        ([[1]], False, Form(2, True)),
        ([[1, 1, 1]], False, Form(4, True)),
        ([[1], [1, 1, 1, 1]], False, Form(4, True)),  # replicas: the one with the most
        ([[1, 2]], False, Form(4, False)),
        ([[1, 1, 1]], True, Form(4, False)),
        ([[9]], False, None),
        ([[]], False, None),
    ):
        assert form_of(given, lengths, split=split) == form
    for columns, width in ((0, 2), (2, 2), (3, 8), (9, None)):
        assert form_of(given, [[1]], split=False, widths=(None, 8, 2), columns=columns) == Form(2, True, width)
    assert form_of((1,), [[1]], split=True) is None and form_of((), [[1]], split=False) is None
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(
            InputError, match=re.escape(f"capture: each size must be an integer of at least 1: got {wrong}")
        ):
            sizes([wrong])


@pytest.mark.parametrize(
    ("query", "tokens", "requests", "found"),
    [
        ((1, 1), 4, 4, (1, 1, 1, 1)),
        ((1, 2), 6, 3, (1, 2, 3)),
        ((2, 2), 4, 3, (2, 2, 0)),
        ((), 3, 3, (1, 1, 1)),
        ((), 5, 2, (5, 0)),
        ((0, 2), 3, 3, (0, 2, 1)),
    ],
)
def test_padding_becomes_requests(query, tokens, requests, found):
    """Without history and without slots; what requests have is as it was."""
    blocks = [[b] for b in range(len(query))]
    sizes = {"blocks": 8, "tokens": tokens, "requests": requests, "table_width": 1}
    (plain,) = plan_batch(Sharding(), history=(3,) * len(query), query=query, block_table=blocks, **sizes)
    made = whole(plain)
    assert made.query_lengths == found and sum(found) == tokens
    assert made._replace(query_lengths=plain.query_lengths) == plain
    assert all(slot == -1 for slot in made.slots[sum(query) :])


def test_padding_without_a_free_request_is_refused():
    (batch,) = plan_batch(
        Sharding(), history=(1, 1), query=(1, 1), block_table=[[0], [1]], blocks=2, tokens=3, requests=2, table_width=1
    )
    with pytest.raises(InputError, match="requests: one must be free for 1 tokens of padding: got 2, all taken"):
        whole(batch)


# --- the session -----------------------------------------------------------------------------------------------------


def test_what_is_captured_is_held_against_the_law(machine, monkeypatch):
    """As a session of all sizes and of what runs beside them; the runner says so where it is not legal."""
    made = runner(machine, mtp=True, capture=(2, 6))
    texts(made, drafts=2)
    members = made.captures.everybody
    assert made.captures.checked == len(members)
    names = {(one.name.rstrip("0123456789"), bool(one.pool)) for one in members}
    assert names == {("model", True), ("mtp", True), ("model", False), ("mtp", False)}
    assert [one for one in members if one.pool] == list(made.captures.members.values())
    some = members[:4]
    whole_session = session(some)
    check_session(whole_session)
    name = next(action for action in whole_session.actions if isinstance(action, Update))
    less = evolve(whole_session, actions=tuple(a for a in whole_session.actions if a is not name))
    with pytest.raises(LawError, match="rule 9"):
        check_session(less)
    assert _pairs(session(members)) >= {(a.name, b.name) for a in members for b in members}
    later = _pairs(session(members, known=3))
    assert later >= {(a.name, b.name) for a in members for b in members if a not in members[:3] or b not in members[:3]}
    monkeypatch.setattr("mla_fx.models.capture.session", lambda members, known: less)
    broken = runner(machine, capture=(2,))
    for use in (broken.ready, lambda: broken.forward([[Piece(tokens=[1], start=0, table=[0])]], [[0]], filling=False)):
        with pytest.raises(LawError, match="rule 9"):
            use()


def test_hidden_states_are_taken_before_they_are_void(machine):
    """The drafter's copy of them comes behind the replay that gives them; behind another replay it is refused."""
    made = runner(machine, mtp=True, capture=(2,))
    made.ready()
    members, (single, mixed) = made.captures.members, (Form(2, True), Form(2, False))
    first, second, drafts = (members[key].name for key in (("model", single), ("model", mixed), ("mtp", single)))
    held = session(made.captures.everybody)
    check_session(held)
    taken = f"{second}.{members['model', mixed].program.outputs[1]}"
    fill = held.actions.index(Fill(drafts, takes=(("hidden", taken),)))
    between = in_turn([turn(members["model", single], captured=True)], first=len(held.actions))
    late = evolve(held, actions=(*held.actions[:fill], *between, *held.actions[fill:]))
    (found,) = session_violations(late)
    assert found.rule == 8 and found.order
    assert f"takes {taken} of replay {second}" in found.message and f"and replay {first}" in found.message


def test_a_runner_refuses_hidden_states_that_are_void(machine):
    made = runner(machine, mtp=True, capture=(2,))
    piece = Piece(tokens=[1], start=0, table=[0])
    given = [made.forward([[piece]], [[0]], filling=False)[1] for _ in range(2)]
    with pytest.raises(InputError, match="hidden: must be read before the next captured step: got what an earlier"):
        made.predict([[piece]], given[0], [[0]], [[0]], filling=False)
    made.predict([[piece]], given[1], [[0]], [[0]], filling=False)
    eager = made.forward([[piece]], [[0]], filling=True)[1]
    made.forward([[piece]], [[0]], filling=False)
    made.predict([[piece]], eager, [[0]], [[0]], filling=False)  # an eager run's stay


def test_an_eager_run_shares_states_and_workspaces(machine):
    """It stands in the session with all captured programs; where it makes a workspace grow, that is refused."""
    made = runner(machine, mtp=True, capture=(2,))
    made.ready()
    members = made.captures.everybody
    eager = next(one for one in members if not one.pool and one.name.startswith("model"))
    assert Run(eager.name) in session(members).actions
    assert set(eager.program.states()) == {
        shared.partition(".")[2] for names in session(members).shared for shared in names if eager.name + "." in shared
    }
    rooms = [evolve(one, room=(("workspace", 64 if one is not eager else 65),)) for one in members]
    check_session(session([evolve(one, room=(("workspace", 64),)) for one in members]))
    with pytest.raises(LawError, match=f"rule 10: .* run {eager.name} .* has made it grow"):
        check_session(session(rooms))


def test_nothing_is_captured_once_requests_are_served(machine):
    """With a prediction module, and with drafts of another kind."""
    made = runner(machine, mtp=True, capture=(2, 6))
    texts(made, drafts=2)
    captures = [entry for entry in machine.module.log if entry == ("capture",)]
    assert len(captures) == len(made.captures.members) == 8
    other = runner(machine, capture=(2,))
    Engine(runner=other, chunk=8, drafter=_Nothing())
    assert [form for _, form in other.captures.members] == [Form(2, True), Form(2, False)]
    other.ready(drafts=True)  # what is there stays
    assert len([entry for entry in machine.module.log if entry == ("capture",)]) == 10


class _Nothing:
    """Drafts nothing."""

    count = 1

    def propose(self, served: Any, hidden: Any) -> list[list[int]]:
        return [[] for _ in served]


def _pairs(held: Session) -> set[tuple[str, str]]:
    """Which program runs right behind which."""
    return set(pairwise(action.member for action in held if isinstance(action, Replay | Run)))


def test_what_cannot_be_captured_is_refused_with_the_reason(machine):
    shape = StepShape(requests=2, blocks=64, block_size=4, table_width=32, dtype="fp32")
    made = Runner.load(Checkpoint.open(small()), backends.get("cpu"), shape=shape, capture=(1,))
    with pytest.raises(InputError, match="capture: must be for a device that has graphs"):
        Engine(runner=made)


def test_tables_as_wide_as_a_context_needs(machine, monkeypatch):
    """A step goes with the narrowest that its longest request has room in, of 2 requests of 10 and 30 tokens."""
    replays, replay = [], Graph.replay
    monkeypatch.setattr(Graph, "replay", lambda graph: (replays.append(graph), replay(graph)))
    made = runner(machine, ranks=2, capture=(2,), contexts=(8, 16, 32, 4096))
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5]]
    engine = Engine(runner=made, chunk=8)
    asked = [engine.add(prompt, max_new_tokens=count) for prompt, count in zip(prompts, (4, 30), strict=True)]
    for _ in run(engine):
        pass
    right = [oracle(small()).greedy(prompt, count) for prompt, count in zip(prompts, (4, 30), strict=True)]
    assert [request.new_tokens for request in asked] == right
    forms = {key[1]: made.programs[key] for key in made.captures.members}
    assert [*forms] == [Form(2, True, columns) for columns in (None, 4, 2, 1)]
    tables = {form: run.program.avals()["batch.block_table"].shape for form, run in forms.items()}
    assert tables == {form: (2, form.columns or 32) for form in forms}
    steps = [form.columns for graph in replays for form, run in forms.items() if run.body.graph is graph]
    # The longer one's text has so many tokens in step after step, its prompt's last among them; 8 fill a column.
    assert steps == [next((width for width in (1, 2, 4) if count <= 8 * width), None) for count in range(6, 36)]


@pytest.mark.parametrize("name", ["batch-pipelined", "dual-batch"])
def test_micro_batches(machine, name):
    made = runner(machine, ranks=2, capture=(2, 4), orchestration=orchestrations.NAMED[name])
    right = [oracle(small()).greedy(p, 3 + 2 * k) for k, p in enumerate(random_prompts(3, seed=3))]
    assert texts(made, count=3) == right
    assert [key[1] for key in made.captures.members] == [Form(4, False), Form(2, False)]
