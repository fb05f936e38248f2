"""What was generated outlives the engine: a snapshot at any step, also one that failed, goes on elsewhere the same."""

import json
import pickle

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_fx.effects import InputError
from mla_fx.models import Engine, Sampling
from tests.models.served import Paged, make_runner, run, small
from tests.models.test_requests import Alphabet, Guesses, paged

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.2, top_k=6, repetition_penalty=1.3, presence_penalty=0.4, seed=2**63),
]


def asked(engine):
    """Five requests of every kind: greedy and drawn, with a stop string, with logprobs, with ends."""
    ways = [{}, {"stop": ["cab", "k"]}, {"top_logprobs": 2}, {}, {"stop": ["a"], "top_logprobs": 0}]
    return [
        engine.add([n, n + 1], max_new_tokens=5 + n, sampling=SAMPLINGS[n % 3], **way) for n, way in enumerate(ways)
    ]


def told(requests):
    """All that a request is in the end."""
    return [(r.number, r.new_tokens, r.text, r.logprobs, r.finish_reason, r.error) for r in requests]


def whole(make):
    engine = make()
    requests = asked(engine)
    list(run(engine))
    return told(requests)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    cuts=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    as_json=st.booleans(),
    drafts=st.integers(0, 2),
    replicas=st.integers(1, 3),
)
def test_a_snapshot_goes_on_where_it_was_taken(cuts, as_json, drafts, replicas):
    """Taken again and again, after any number of steps, each time for another engine with empty caches."""

    def make():
        runner = paged(requests=2, blocks=12, table_width=8)
        runner.replicas = replicas
        drafter = Guesses(runner, drafts) if drafts else None
        return Engine(runner=runner, chunk=6, drafter=drafter, end=(9,), tokenizer=Alphabet())

    right, found = whole(make), {}
    engine = make()
    live = asked(engine)
    for cut in cuts:
        for _ in range(cut):
            engine.step()
        found |= {line[0]: line for line in told(live)}
        snapshot = engine.snapshot()
        copied = json.loads(json.dumps(snapshot)) if as_json else pickle.loads(pickle.dumps(snapshot))
        engine = make()
        live = engine.restore(copied)
    list(run(engine))
    found |= {line[0]: line for line in told(live)}
    assert [found[number] for number in range(5)] == right
    assert engine.add([1], max_new_tokens=1).number == 5  # numbers go on


@define
class Failing(Paged):
    """A runner that is lost in some step, as a group is whose rank died."""

    left: int = 3
    steps: list = field(factory=list)

    def forward(self, *arguments, **options):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("lost")
        return super().forward(*arguments, **options)


@define
class Losing(Guesses):
    """A drafter that is lost in some step: the tokens of that are there, and its outputs are not."""

    left: int = 3

    def propose(self, served, hidden):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("lost")
        return super().propose(served, hidden)


@pytest.mark.parametrize("where", ["model", "drafter"])
@pytest.mark.parametrize("lasts", range(6))
def test_requests_of_a_failed_step_are_not_lost(where, lasts):
    """Also those that ended in it, whose outputs nobody has seen."""

    def make(left):
        runner = Failing(paged(requests=3).shape, left=left if where == "model" else 99)
        drafter = Losing(runner, 2, left=left if where == "drafter" else 99)
        return Engine(runner=runner, chunk=8, drafter=drafter, end=(9,), tokenizer=Alphabet())

    right = whole(lambda: make(99))
    engine = make(lasts)
    first = asked(engine)
    seen = set()  # whose end has been given out
    with pytest.raises(RuntimeError, match="lost"):
        while engine.busy:
            seen |= {output.request.number for output in engine.step() if output.finished}
    engine, snapshot = make(99), engine.snapshot()
    requests = engine.restore(snapshot)
    known = {request.number for request in requests}
    assert known == set(range(5)) - seen
    list(run(engine))
    ended = [request for request in first if request.number in seen]
    assert sorted(told([*ended, *requests])) == right


def test_a_real_model_goes_on():
    """Caches of another runner, on other ranks: the same texts in float32, greedy and drawn."""

    def make(ranks):
        return Engine(runner=make_runner(small(), ranks=ranks, requests=3), chunk=8)

    engine = make(2)
    requests = [engine.add([3, n, 4], max_new_tokens=8, sampling=SAMPLINGS[n]) for n in range(3)]
    for _ in range(4):
        engine.step()
    snapshot = engine.snapshot()
    list(run(engine))
    other = make(4)
    resumed = other.restore(snapshot)
    assert all(1 <= len(request.new_tokens) < 8 for request in resumed)
    list(run(other))
    assert [r.new_tokens for r in resumed] == [r.new_tokens for r in requests]


def test_what_is_refused():
    runner = paged(blocks=4, table_width=4)
    engine = Engine(runner=runner)
    engine.add([1, 2, 3], max_new_tokens=5)
    snapshot = engine.snapshot()
    with pytest.raises(InputError, match=r"^restore: must come before any request: got an engine that has had 1$"):
        engine.restore(snapshot)
    small_one = Engine(runner=paged(blocks=3, table_width=4))
    with pytest.raises(InputError, match=r"^blocks: prompt and max_new_tokens, 7 positions without the last, need 4"):
        small_one.restore(snapshot)
    assert not small_one.busy and small_one.add([1], max_new_tokens=1).number == 0
    with pytest.raises(InputError, match=r"^snapshot: must be what Engine.snapshot gave: got None$"):
        Engine(runner=runner).restore(None)
