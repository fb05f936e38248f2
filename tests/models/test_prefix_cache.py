"""Requests that begin alike share blocks: of the whole group, full ones only, and the text is what it is without."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_fx import Sharding, StepShape
from mla_fx.models import BlockManager, Engine, MtpDrafter, OutOfBlocksError
from tests.cases import mostly_soak
from tests.models.served import Paged, make_runner, oracle, random_prompts, run, small
from tests.models.test_requests import Guesses


def paged(*, requests=2, blocks=200, block_size=2, ranks=1, table_width=200):
    shape = StepShape(
        ranks=ranks, requests=requests, blocks=blocks, block_size=block_size, table_width=table_width, dtype="fp32"
    )
    return Paged(shape)


def common(one, other):
    """How many tokens two texts begin with in common."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# --- blocks ------------------------------------------------------------------


def test_the_unit_is_the_block_of_the_whole_group():
    """Two ranks of four rows: 8 positions, and neither 7 nor the 4 of one rank's block."""
    for length, shared in ((4, 0), (7, 0), (8, 8), (15, 8), (16, 16)):
        manager = BlockManager(Sharding(ranks=2, block_size=4), blocks=20)
        text = [*range(length), 100]
        manager.allocate("a", len(text), text)
        manager.fill("a", text, len(text))
        manager.allocate("b", length + 2, [*range(length), 200, 201])
        assert manager.shared("b") == shared
        held = [manager.table(name) for name in "ab"]
        assert common(*held) == shared // 8 and len({*held[0], *held[1]}) == sum(map(len, held)) - shared // 8


def test_only_what_has_been_filled_is_shared():
    manager = BlockManager(Sharding(block_size=2), blocks=20)
    text = list(range(9))
    manager.allocate("a", 9, text)
    for filled, shared in ((0, 0), (1, 0), (3, 2), (6, 6), (9, 8)):
        manager.fill("a", text, filled)
        manager.allocate("b", 9, text)
        assert manager.shared("b") == shared
        manager.free("b")


def test_the_last_token_is_always_left_to_process():
    manager = BlockManager(Sharding(block_size=2), blocks=20)
    text = list(range(8))
    manager.allocate("a", 8, text)
    manager.fill("a", text, 8)
    manager.allocate("b", 8, text)
    assert manager.shared("b") == 6


def test_a_block_depends_on_all_before_it():
    """The same two tokens behind other ones are another block."""
    manager = BlockManager(Sharding(block_size=2), blocks=20)
    manager.allocate("a", 5, [1, 2, 3, 4, 5])
    manager.fill("a", [1, 2, 3, 4, 5], 5)
    manager.allocate("b", 5, [9, 9, 3, 4, 5])
    assert manager.shared("b") == 0


def test_a_block_may_depend_on_the_token_behind_it():
    manager = BlockManager(Sharding(block_size=2), blocks=20, ahead=1)
    manager.allocate("a", 5, [1, 2, 3, 4, 5])
    manager.fill("a", [1, 2, 3, 4, 5], 4)
    for text, shared in (([1, 2, 3, 4, 6], 2), ([1, 2, 3, 4, 5], 4), ([1, 2, 9], 0), ([1, 2, 3], 2)):
        manager.allocate("b", len(text), text)
        assert manager.shared("b") == shared
        manager.free("b")


def test_the_longest_unused_goes_first_and_the_end_before_the_beginning():
    manager = BlockManager(Sharding(block_size=1), blocks=6)

    def serve(name, text):
        manager.allocate(name, len(text), text)
        found = manager.shared(name)
        manager.fill(name, text, len(text))
        manager.free(name)
        return found

    assert (serve("a", [1, 2, 3]), serve("b", [4, 5]), serve("a", [1, 2, 9])) == (0, 0, 2)
    assert manager.available == 6
    serve("c", [7, 8])  # takes the places of 3 and of 5, the ends of what was used before [1, 2, 9]
    assert serve("b", [4, 5]) == 1
    assert serve("a", [1, 2, 9]) == 2
    assert (manager.asked, manager.found) == (15, 5)


def test_blocks_in_use_are_never_evicted():
    manager = BlockManager(Sharding(block_size=1), blocks=4)
    text = [1, 2, 3]
    manager.allocate("a", 3, text)
    manager.fill("a", text, 3)
    manager.allocate("b", 3, text)
    assert manager.shared("b") == 2 and manager.available == 0
    manager.free("a")
    assert manager.available == 1  # the two others are b's too
    with pytest.raises(OutOfBlocksError, match=r"^blocks: request 'c' needs 2 more, and 1 of 4 are free$"):
        manager.allocate("c", 2, [9, 9])
    with pytest.raises(OutOfBlocksError, match=r"^blocks: request 'c' needs 2 more, and 0 of 4 are free$"):
        manager.allocate("c", 5, [1, 2, 3, 4, 5])  # three would be shared, one of them now free
    assert manager.available == 1


# --- what is said ------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(0, 1), max_size=4), st.integers(1, 9)),
        min_size=1,
        max_size=7,
    ),
    ranks=st.integers(1, 3),
    requests=st.integers(1, 3),
    block_size=st.integers(1, 3),
    spare=st.sampled_from([0, 1, 3, 200]),
    more=st.sampled_from([0, 3, 30]),
    drafts=st.integers(0, 2),
)
def test_each_says_what_it_would_say_alone(prompts, ranks, requests, block_size, spare, more, drafts):
    """Beginnings of one text and others: in chunks, with drafts, with hardly enough blocks.  `Paged` reads the tokens
    from where the table says they are, so a block that holds anything else changes the text."""
    asked = [([1, 0, 1, 1, 0, 0, 1, 0, 1][:cut] + tail or [1], count) for cut, tail, count in prompts]
    longest = max(-(-(len(prompt) + count - 1) // (ranks * block_size)) for prompt, count in asked)
    runner = paged(requests=requests, ranks=ranks, block_size=block_size, blocks=longest + spare, table_width=longest)
    drafter = Guesses(runner, drafts, random.Random(0)) if drafts else None
    engine = Engine(runner=runner, chunk=requests + more, drafter=drafter)
    added = [engine.add(prompt, max_new_tokens=count) for prompt, count in asked]
    list(run(engine))
    for request, (prompt, count) in zip(added, asked, strict=True):
        assert request.new_tokens == runner.greedy(prompt, count)
        assert request.reused % (ranks * block_size) == 0
    assert engine.replicas[0].blocks.available == longest + spare
    assert engine.replicas[0].blocks.found == sum(request.reused for request in added)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=8),
    ranks=st.integers(1, 2),
    block_size=st.integers(1, 3),
)
def test_one_after_the_other_all_that_can_be_shared_is(prompts, ranks, block_size):
    """Against the longest beginning of any text before, in whole blocks; and what is shared is not processed."""
    runner = paged(ranks=ranks, block_size=block_size)
    engine, unit, before = Engine(runner=runner), ranks * block_size, []
    for prompt in prompts:
        steps = len(runner.steps)
        request = engine.add(prompt, max_new_tokens=3)
        list(run(engine))
        right = max((common(prompt[:-1], text[:-1]) // unit * unit for text in before), default=0)
        assert request.reused == right
        assert sum(len(p.tokens) for step in runner.steps[steps:] for p in step) == len(prompt) + 2 - right
        before.append(request.tokens)


def test_off_by_one_flag():
    for on in (True, False):
        runner = paged()
        engine = Engine(runner=runner, prefix_cache=on)
        added = []
        for _ in range(2):
            added.append(engine.add([1, 2, 3, 4, 5], max_new_tokens=2))
            list(run(engine))
        assert added[1].reused == (4 if on else 0)
        assert (engine.replicas[0].blocks.asked, engine.replicas[0].blocks.found) == ((10, 4) if on else (0, 0))


@pytest.mark.parametrize(
    ("ranks", "blocks", "chunk", "drafts"),
    mostly_soak([(1, 24, 7, 0), (2, 96, 5, 2), (4, 8, 9, 1)], [(1, 24, 7, 0), (4, 8, 9, 1)]),
)
def test_a_model_says_the_same_bit_for_bit(ranks, blocks, chunk, drafts):
    """Float32 tokens, three requests at a time: with and without, and those of the dense model."""
    directory = small()
    stem = random_prompts(1, longest=40, seed=21)[0] + list(range(20))
    prompts = [
        stem[:cut] + tail for cut, tail in ((20, []), (24, [3]), (len(stem), [5, 6]), (17, [1]), (8, [2]), (20, []))
    ]
    texts, reused = [], []
    for on in (False, True):
        runner = make_runner(directory, ranks=ranks, requests=3, blocks=blocks, mtp=drafts > 0)
        engine = Engine(
            runner=runner, chunk=chunk, drafter=MtpDrafter(runner, drafts) if drafts else None, prefix_cache=on
        )
        added = [engine.add(prompt, max_new_tokens=9) for prompt in prompts]
        list(run(engine))
        texts.append([request.new_tokens for request in added])
        reused.append(sum(request.reused for request in added))
    assert texts[0] == texts[1] == [oracle(directory).greedy(prompt, 9) for prompt in prompts]
    assert reused[0] == 0 and reused[1] >= 16
