"""The engine: requests come and go and share steps and blocks, and each says what it would say alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_fx import StepShape
from mla_fx.effects import InputError
from mla_fx.models import Engine, OutOfBlocksError, Sampling
from tests.models.served import Paged, finish, make_runner, oracle, random_prompts, run, small

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 9], [3, 1, 3, 3, 7, 0, 2, 4, 5], [5, 5]]


def paged(*, ranks=1, requests=2, blocks=64, block_size=2, table_width=64, **options):
    shape = StepShape(
        ranks=ranks, requests=requests, blocks=blocks, block_size=block_size, table_width=table_width, dtype="fp32"
    )
    return Paged(shape, **options)


def state(engine):
    """All that a refused call could change."""
    running, waiting = [r.number for r in engine.running], [r.number for r in engine.waiting]
    tables = {number: engine.replicas[0].blocks.table(number) for number in running}
    return running, waiting, tables, engine.replicas[0].blocks.available, [list(r.tokens) for r in engine.running]


# --- who says what ---------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    prompts=st.lists(st.tuples(st.lists(st.integers(0, 10), min_size=1, max_size=12), st.integers(1, 12)), max_size=7),
    arrivals=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    ranks=st.integers(1, 3),
    requests=st.integers(1, 4),
    more=st.integers(0, 8),
    spare=st.sampled_from([0, 1, 2, 5, 100]),
    block_size=st.integers(1, 3),
    end=st.sampled_from([(), (0,), (0, 4, 7)]),
    replicas=st.integers(1, 3),
)
def test_each_says_what_it_would_say_alone(prompts, arrivals, ranks, requests, more, spare, block_size, end, replicas):
    """Any requests that come at any steps, with hardly the blocks for the longest one, or plenty of them."""
    longest = max((-(-(len(p) + count - 1) // (ranks * block_size)) for p, count in prompts), default=1)
    runner = paged(ranks=ranks, requests=requests, blocks=longest + spare, block_size=block_size, table_width=longest)
    runner.replicas = replicas
    engine = Engine(runner=runner, chunk=requests + more, end=end)
    coming, told, steps = list(zip(prompts, arrivals, strict=False)), {}, 0
    wait = 0
    while coming or engine.busy:
        if coming and wait == 0:
            (prompt, count), wait = coming.pop(0)
            told[engine.add(prompt, max_new_tokens=count)] = []
        wait = max(wait - 1, 0)
        for output in engine.step():
            assert output.tokens
            told[output.request] += output.tokens
            assert output.finished == (output.request not in engine.running and output.request not in engine.waiting)
        steps += 1
        assert steps < 1000
    assert all(replica.blocks.available == longest + spare for replica in engine.replicas)
    for (request, tokens), (prompt, count) in zip(told.items(), prompts, strict=True):
        assert tokens == request.new_tokens == runner.greedy(prompt, count, end)
        assert request.first_token >= request.arrived
    assert all(sum(len(piece.tokens) for piece in step) <= requests + more for step in runner.steps)


def test_prompts_join_and_leave_while_others_run():
    """Four steps by hand: chunks of 4, two at a time, the third prompt takes the place of the second."""
    runner = paged(requests=2)
    engine = Engine(runner=runner, chunk=4)
    first, second, third = (engine.add(p, max_new_tokens=n) for p, n in [(PROMPTS[1], 6), (PROMPTS[0], 1), ([5], 2)])
    seen = []
    while engine.busy:
        outputs = [(o.request.number, len(o.tokens), o.finished) for o in engine.step()]
        seen.append(([(p.start, len(p.tokens)) for p in runner.steps[-1]], outputs, runner.filled[-1]))
    assert seen == [
        ([(0, 1), (0, 3)], [(0, 1, False)], True),  # the prompt of 7 tokens takes what is left of the chunk
        ([(1, 1), (3, 3)], [(0, 1, False)], True),
        ([(2, 1), (6, 1)], [(0, 1, False), (1, 1, True)], False),
        ([(3, 1), (0, 1)], [(0, 1, False), (2, 1, False)], False),
        ([(4, 1), (1, 1)], [(0, 1, False), (2, 1, True)], False),
        ([(5, 1)], [(0, 1, True)], False),
    ]
    assert [r.new_tokens for r in (first, second, third)] == [
        runner.greedy(p, n) for p, n in [(PROMPTS[1], 6), (PROMPTS[0], 1), ([5], 2)]
    ]


def test_requests_go_where_the_fewest_run():
    """Two replicas, one request each at a time: who waits takes the place that is free first, by its number."""
    runner = paged(requests=1)
    runner.replicas = 2
    engine = Engine(runner=runner)
    for n in (4, 2, 1, 2):
        engine.add([n], max_new_tokens=n)
    seen = []
    while engine.busy:
        engine.step()
        seen.append([[r.number for r in replica.running] for replica in engine.replicas])
    assert seen == [[[0], [1]], [[0], []], [[0], []], [[], [3]], [[], []]]


def test_a_real_model_says_the_same():
    """Seven prompts, three at a time, in chunks shorter than most of them, on two ranks."""
    directory, prompts = small(), random_prompts(7)
    engine = Engine(runner=make_runner(directory, ranks=2, requests=3), chunk=6)
    assert max(map(len, prompts)) > 12
    assert finish(engine, prompts, 10) == [oracle(directory).greedy(prompt, 10) for prompt in prompts]


def test_time_to_the_first_token():
    engine = Engine(runner=paged(), chunk=2)
    request = engine.add([1, 2, 3, 4, 5], max_new_tokens=3)
    engine.step()
    assert request.first_token is None
    times = []
    for output in engine.run():
        times.append(request.first_token)
        assert output.request is request
    assert len(times) == 3
    assert len(set(times)) == 1
    assert times[0] >= request.arrived


# --- ends -------------------------------------------------------------------


def test_end_tokens_and_limits():
    runner = paged()
    whole = runner.greedy(PROMPTS[0], 8)
    end = whole[3]
    assert end not in whole[:3]
    engine = Engine(runner=runner, end=[end])
    request = engine.add(PROMPTS[0], max_new_tokens=8)
    *_, last = run(engine)
    assert request.new_tokens == whole[:4]  # with the end token
    assert last.finished
    for limit in (1, 3, 4):
        request = engine.add(PROMPTS[0], max_new_tokens=limit)
        assert sum(len(o.tokens) for o in run(engine)) == limit
        assert request.new_tokens == whole[:limit]
        assert request.left == 0


# --- few blocks -------------------------------------------------------------


def test_the_youngest_gives_its_blocks_back_and_starts_over():
    """Two requests need 4 blocks each of 6: the second one stops, waits, and goes on with what it said."""
    runner = paged(blocks=6, block_size=2)
    engine = Engine(runner=runner, prefix_cache=False)
    old, young = (engine.add([n, n, n], max_new_tokens=6) for n in (1, 2))
    preempted = None
    for step in range(100):
        if not engine.busy:
            break
        engine.step()
        if young in engine.waiting and preempted is None:
            preempted = step, list(young.new_tokens)
            assert old in engine.running
            assert young.cached == 0
    assert preempted is not None
    assert preempted[1]
    assert [old.new_tokens, young.new_tokens] == [runner.greedy([n, n, n], 6) for n in (1, 2)]
    again = [piece for pieces in runner.steps for piece in pieces if piece.start == 0 and piece.tokens[0] == 2]
    assert [list(piece.tokens) for piece in again] == [[2, 2, 2], [2, 2, 2, *preempted[1]]]
    assert engine.replicas[0].blocks.available == 6


def test_a_real_model_with_few_blocks():
    directory, prompts = small(), random_prompts(4, seed=3)
    runs = []
    for blocks in (64, 8):
        engine = Engine(runner=make_runner(directory, ranks=2, requests=4, blocks=blocks), chunk=9)
        runs.append((finish(engine, prompts, 24), len(engine.runner.programs)))
    assert runs[0][0] == runs[1][0] == [oracle(directory).greedy(prompt, 24) for prompt in prompts]


def test_nobody_starves():
    """Blocks for one request at a time, many requests: all finish, in the order of arrival."""
    runner = paged(requests=4, blocks=4, block_size=3)
    engine = Engine(runner=runner, chunk=4)
    requests = [engine.add(prompt, max_new_tokens=13 - len(prompt)) for prompt in PROMPTS * 3]
    order = [output.request.number for output in run(engine) if output.finished]
    assert order == sorted(order)
    assert len(order) == len(requests)
    for request in requests:
        assert request.new_tokens == runner.greedy(request.prompt, 13 - len(request.prompt))


# --- sampling ---------------------------------------------------------------


def sampled(temperature, *, requests=4, blocks=64, seeds=range(6), chunk=8):
    engine = Engine(runner=paged(requests=requests, blocks=blocks), chunk=chunk)
    added = [
        engine.add(PROMPTS[seed % 5], max_new_tokens=8, sampling=Sampling(temperature=temperature, seed=seed))
        for seed in seeds
    ]
    for _ in run(engine):
        pass
    return [tuple(request.new_tokens) for request in added]


def test_a_seed_says_what_is_sampled():
    """However requests are served, alone or together, with preemption or without."""
    once = sampled(1.0)
    assert once == sampled(1.0)
    assert once == sampled(1.0, requests=1)
    assert once == sampled(1.0, blocks=9)
    assert once == [text for seed in range(6) for text in sampled(1.0, seeds=[seed])]
    assert once != sampled(1.0, seeds=range(6, 12))
    assert len({tuple(sampled(1.0, seeds=[seed])) for seed in range(0, 100, 5)}) > 15  # one prompt, many texts


def test_a_low_temperature_is_greedy():
    """Down to numbers so small that the logits' quotient is infinite."""
    for temperature in (1e-3, 1e-300, 5e-324):
        assert sampled(temperature) == [tuple(paged().greedy(PROMPTS[seed % 5], 8)) for seed in range(6)]


# --- abort ------------------------------------------------------------------


def test_abort_of_what_runs_and_of_what_waits():
    runner = paged(requests=2)
    engine = Engine(runner=runner)
    requests = [engine.add(prompt, max_new_tokens=6) for prompt in PROMPTS]
    engine.step()
    engine.step()
    engine.abort(requests[0])
    engine.abort(requests[3])
    for request in (requests[0], requests[3]):
        with pytest.raises(InputError, match=rf"^request: must be running or waiting: got number {request.number}$"):
            engine.abort(request)
    for _ in run(engine):
        pass
    texts = [runner.greedy(prompt, 6) for prompt in PROMPTS]
    assert [r.new_tokens for r in requests] == [texts[0][:2], texts[1], texts[2], [], texts[4]]
    assert engine.replicas[0].blocks.available == 64


def test_an_engine_without_requests():
    engine = Engine(runner=paged())
    assert not engine.busy
    assert engine.step() == []
    assert list(engine.run()) == []


# --- what is refused --------------------------------------------------------

REFUSED = {
    "no token": ({"prompt": []}, InputError, r"prompt: must have at least one token: got none"),
    "token beyond the vocabulary": ({"prompt": [1, 11]}, InputError, r"prompt: each token must be in 0\.\.10: got 11"),
    "negative token": ({"prompt": [-1]}, InputError, r"prompt: each token must be in 0\.\.10: got -1"),
    "fractional token": ({"prompt": [1.5]}, InputError, r"prompt: each token must be an integer: got \[1\.5\]"),
    "text": ({"prompt": "1 + 2"}, InputError, r"prompt: each token must be an integer: got '1 \+ 2'"),
    "no new token": ({"max_new_tokens": 0}, InputError, r"max_new_tokens: must be an integer of at least 1: got 0"),
    "half a token": (
        {"max_new_tokens": 1.5},
        InputError,
        r"max_new_tokens: must be an integer of at least 1: got 1\.5",
    ),
    "too long for the blocks": (
        {"prompt": [1] * 10, "max_new_tokens": 8},
        OutOfBlocksError,
        r"blocks: prompt and max_new_tokens, 17 positions without the last, need 5 blocks of 4, "
        r"and a request can have 4",
    ),
    "too long for the model": (
        {"prompt": [1] * 8, "max_new_tokens": 8},
        InputError,
        r"max_new_tokens: with the prompt must be at most max_position_embeddings, 15: got 16",
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_prompts_that_are_refused(change):
    arguments, error, message = REFUSED[change]
    given = {"prompt": [1, 2], "max_new_tokens": 3} | arguments
    runner = paged(ranks=2, blocks=4, block_size=2, limit=15 if "model" in change else None)
    engine = Engine(runner=runner)
    kept = [engine.add(PROMPTS[2], max_new_tokens=4) for _ in range(3)]
    engine.step()
    before = state(engine)
    with pytest.raises(InputError, match=f"^{message}$") as raised:
        engine.add(given["prompt"], max_new_tokens=given["max_new_tokens"])
    assert raised.type is error
    assert state(engine) == before
    assert engine.add([1], max_new_tokens=1).number == 3
    for _ in run(engine):
        pass
    assert [request.new_tokens for request in kept] == [runner.greedy(PROMPTS[2], 4)] * 3


@pytest.mark.parametrize(("blocks", "width"), [(4, 64), (64, 4)])
def test_the_longest_that_fits(blocks, width):
    """The last token is never processed, so it needs no position."""
    runner = paged(ranks=2, blocks=blocks, block_size=2, table_width=width)
    engine = Engine(runner=runner)
    request = engine.add([1] * 10, max_new_tokens=7)
    for _ in run(engine):
        pass
    assert request.new_tokens == runner.greedy([1] * 10, 7)
    with pytest.raises(OutOfBlocksError):
        engine.add([1] * 10, max_new_tokens=8)


def test_other_integers():
    """Whatever counts as an integer: a tensor's elements, NumPy's numbers."""
    engine = Engine(runner=paged(), end=np.array([10]))
    request = engine.add(torch.tensor([1, 2]), max_new_tokens=np.int64(1), top_logprobs=np.uint8(2))
    assert request.prompt == (1, 2)
    numbers = [*request.prompt, request.max_new_tokens, request.top_logprobs, *engine.end]
    assert [type(number) for number in numbers] == [int] * 5
    assert len(list(run(engine))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 1}, r"chunk: must be an integer of at least the requests of a step, 2: got 1"),
        ({"chunk": 4.5}, r"chunk: must be an integer of at least the requests of a step, 2: got 4\.5"),
        ({"end": 5}, r"end: must be a collection of tokens, each an integer of at least 0: got 5"),
        ({"end": None}, r"end: must be a collection of tokens, each an integer of at least 0: got None"),
        ({"end": "ab"}, r"end: must be a collection of tokens, each an integer of at least 0: got 'ab'"),
        ({"end": [1, -1]}, r"end: must be a collection of tokens, each an integer of at least 0: got \[1, -1\]"),
    ],
)
def test_engines_that_are_refused(options, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        Engine(runner=paged(), **options)
