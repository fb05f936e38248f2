"""Who owns a position, where its row lies, and what a step's batch says of it: against dealing out by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_fx import Sharding, StepShape, plan_batch, plan_parts, plan_step
from mla_fx.effects import InputError
from mla_fx.sharding import positions_of
from tests.oracles import owner_by_walking

RANKS = [1, 2, 3, 4, 8]
INTERLEAVES = [1, 2, 4, 16, 128]
each_layout = pytest.mark.parametrize(
    ("ranks", "interleave"), [(w, i) for w in RANKS for i in INTERLEAVES], ids=lambda n: str(n)
)


def deal(length, ranks, interleave):
    """Per rank, the positions it owns, in order."""
    hands = [[] for _ in range(ranks)]
    for position, owner in enumerate(owner_by_walking(length, ranks, interleave)):
        hands[owner].append(position)
    return hands


def slots_by_hand(hand, size, table):
    """Position -> slot: a rank fills its rows one after the other, block after block."""
    return {position: table[row // size] * size + row % size for row, position in enumerate(hand)}


# --- ownership and lengths -------------------------------------------------


@each_layout
def test_owner(ranks, interleave):
    sharding = Sharding(ranks=ranks, interleave=interleave, block_size=interleave)
    length = 2 * ranks * interleave + 1
    assert [sharding.owner(p) for p in range(length)] == owner_by_walking(length, ranks, interleave)


@each_layout
def test_local_lengths(ranks, interleave):
    sharding = Sharding(ranks=ranks, interleave=interleave, block_size=interleave)
    round_ = ranks * interleave
    for length in {*range(150), round_ - 1, round_, round_ + 1, 2 * round_ - 1, 2 * round_, 599}:
        got = sharding.local_lengths(length)
        assert got == tuple(map(len, deal(length, ranks, interleave)))
        assert sum(got) == length
        assert max(got) - min(got) <= interleave


@pytest.mark.parametrize(
    ("length", "ranks", "interleave", "local"),
    [
        (5, 2, 4, (4, 1)),
        (130, 2, 128, (128, 2)),
        (260, 2, 128, (132, 128)),
        (4, 4, 4, (4, 0, 0, 0)),
        (9, 2, 4, (5, 4)),
        (7, 2, 4, (4, 3)),  # after two new tokens of nine, not (5, 4) - 2
        (0, 3, 1, (0, 0, 0)),
    ],
)
def test_worked_lengths(length, ranks, interleave, local):
    assert Sharding(ranks=ranks, interleave=interleave, block_size=128).local_lengths(length) == local


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(RANKS), st.sampled_from(INTERLEAVES), st.integers(1, 3), st.integers(0, 5000))
def test_blocks_hold_every_rank_and_no_more(ranks, interleave, per_block, length):
    size = interleave * per_block
    sharding = Sharding(ranks=ranks, interleave=interleave, block_size=size)
    fullest = max(map(len, deal(length, ranks, interleave)))
    assert (sharding.blocks(length) - 1) * size < fullest <= sharding.blocks(length) * size


# --- slots -----------------------------------------------------------------


@each_layout
@pytest.mark.parametrize("per_block", [1, 2])
def test_slots(ranks, interleave, per_block):
    size = interleave * per_block
    sharding = Sharding(ranks=ranks, interleave=interleave, block_size=size)
    table = [7, 0, 4]
    length = 2 * size * ranks + interleave
    positions = torch.arange(length)
    rows = torch.tensor([table[p // (size * ranks)] for p in range(length)])
    got = sharding.slots(positions, rows)
    assert len(got) == ranks
    for rank, hand in enumerate(deal(length, ranks, interleave)):
        want = slots_by_hand(hand, size, table)
        assert got[rank].dtype == torch.int64
        assert got[rank].tolist() == [want.get(p, -1) for p in range(length)]


def test_worked_slots():
    rows = torch.tensor([5] * 8 + [3] * 4)
    first, second = Sharding(ranks=2, interleave=2, block_size=4).slots(torch.arange(12), rows)
    assert first.tolist() == [20, 21, -1, -1, 22, 23, -1, -1, 12, 13, -1, -1]
    assert second.tolist() == [-1, -1, 20, 21, -1, -1, 22, 23, -1, -1, 12, 13]


def test_slots_of_no_token():
    none = torch.empty(0, dtype=torch.int64)
    assert [s.tolist() for s in Sharding(ranks=3).slots(none, none)] == [[], [], []]


def test_positions_follow_the_history():
    assert positions_of([5, 0, 9], [2, 3, 0]) == [5, 6, 0, 1, 2]
    assert positions_of([], []) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": 0}, r"^ranks: must be an integer of at least 1: got 0$"),
        ({"interleave": -1}, r"^interleave: must be an integer of at least 1: got -1$"),
        ({"block_size": 2.0}, r"^block_size: must be an integer of at least 1: got 2\.0$"),
        ({"interleave": 3, "block_size": 16}, r"^interleave: must divide block_size, 16: got 3$"),
        ({"interleave": 32, "block_size": 16}, r"^interleave: must divide block_size, 16: got 32$"),
    ],
)
def test_layouts_that_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        Sharding(**fields)


def test_length_that_is_refused():
    with pytest.raises(InputError, match=r"^length: must be at least 0: got -1$"):
        Sharding(ranks=2).local_lengths(-1)


# --- the batches of a step -------------------------------------------------

STEP = {
    "history": (9, 0, 7),
    "query": (2, 1, 0),
    "block_table": [[5, 3, 2147480000], [6, -1, 2147480000], [1, 99, 99]],
    "blocks": 8,
    "tokens": 5,
    "requests": 4,
    "table_width": 3,
}


def plan(**changes):
    return plan_batch(Sharding(ranks=2, interleave=2, block_size=4), **STEP | changes)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_batches_of_a_worked_step(as_tensor):
    """Two ranks, two positions in a row, four rows a block; one token and one request are padding."""
    table = STEP["block_table"]
    first, second = plan(block_table=torch.tensor(table) if as_tensor else table)
    assert first.positions.dtype == first.slots.dtype == torch.int64
    assert first.block_table.dtype == torch.int32
    for batch in (first, second):
        assert batch.positions.tolist() == [9, 10, 0, 0, 0]
        assert batch.query_lengths == (2, 1, 0, 0)
        assert batch.block_table.tolist() == [*table, [0, 0, 0]]
    assert first.slots.tolist() == [13, -1, 24, -1, -1]
    assert second.slots.tolist() == [-1, 12, -1, -1, -1]
    assert first.history_lengths == (5, 0, 4, 0)
    assert second.history_lengths == (4, 0, 3, 0)


def test_history_is_cut_by_position():
    """Nine positions of which two are new: the local lengths of seven, not those of nine less two."""
    batches = plan_batch(
        Sharding(ranks=2, interleave=4, block_size=4),
        history=[7], query=[2], block_table=[[0, 1]], blocks=2, tokens=2, requests=1, table_width=2,
    )  # fmt: skip
    assert [b.history_lengths for b in batches] == [(4,), (3,)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 8)), max_size=5),
    ranks=st.sampled_from(RANKS),
    interleave=st.sampled_from([1, 2, 4, 16]),
    per_block=st.integers(1, 2),
    padding=st.integers(0, 2),
    draw=st.randoms(use_true_random=False),
)
def test_any_step(requests, ranks, interleave, per_block, padding, draw):
    history, query = [h for h, _ in requests], [q for _, q in requests]
    size = interleave * per_block
    need = [-(-(h + q) // (size * ranks)) for h, q in requests]
    ids = draw.sample(range(sum(need) + 3), sum(need))
    table = [[ids.pop() for _ in range(n)] for n in need]
    batches = plan_batch(
        Sharding(ranks=ranks, interleave=interleave, block_size=size),
        history=history,
        query=query,
        block_table=[[*row, 2**40, -5] for row in table],  # behind what is needed: anything
        blocks=sum(need) + 3,
        tokens=sum(query) + padding,
        requests=len(requests) + padding,
        table_width=max(need, default=0) + 1,
    )
    assert len(batches) == ranks
    for rank, batch in enumerate(batches):
        slots, positions = [], []
        for b, (h, q) in enumerate(requests):
            hands = slots_by_hand(deal(h + q, ranks, interleave)[rank], size, table[b])
            slots += [hands.get(p, -1) for p in range(h, h + q)]
            positions += range(h, h + q)
            assert batch.block_table[b, : need[b]].tolist() == table[b]
        assert batch.slots.tolist() == slots + [-1] * padding
        assert batch.positions.tolist() == positions + [0] * padding
        assert batch.query_lengths == (*query, *[0] * padding)
        local = [len(deal(h, ranks, interleave)[rank]) for h in history]
        assert batch.history_lengths == (*local, *[0] * padding)


def test_entries_beyond_int32_do_not_wrap():
    """What nobody looks at may be anything, but a huge id must not come out as a small one that looks right."""
    first, _ = plan(block_table=[[5, 3, 2**40 + 2], [6, -(2**40), 0], [1, 0, 0]])
    assert first.block_table[:2].tolist() == [[5, 3, 2**31 - 1], [6, -(2**31), 0]]


def test_step_without_requests():
    (batch,) = plan_batch(
        Sharding(), history=[], query=[], block_table=[], blocks=1, tokens=2, requests=1, table_width=1
    )
    assert batch.slots.tolist() == [-1, -1]
    assert batch.block_table.tolist() == [[0]]
    assert batch.query_lengths == batch.history_lengths == (0,)


def test_blocks_that_are_only_read_may_be_shared():
    """Two requests with one prefix; each writes to a block of its own."""
    table = [[5, 3, 0], [5, 6, 0], [5, 0, 0]]
    first, _ = plan(history=(8, 8, 8), query=(1, 1, 0), block_table=table)
    assert first.slots.tolist() == [12, 24, -1, -1, -1]


ROW = STEP["block_table"]
REFUSED = {
    "history for other requests": (
        {"history": (9, 0)},
        r"history: must have one length for each of query, 3: got 2",
    ),
    "more requests than B": ({"requests": 2}, r"query: must have at most B = 2 requests: got 3"),
    "negative history": ({"history": (9, -1, 7)}, r"history: each length must be at least 0: got \(9, -1, 7\)"),
    "negative query": ({"query": (2, 1, -1)}, r"query: each length must be at least 0: got \(2, 1, -1\)"),
    "more new tokens than T": ({"tokens": 2}, r"query: the sum must be at most T = 2 tokens: got 3, from \(2, 1, 0\)"),
    "rows for other requests": (
        {"block_table": ROW[:2]},
        r"block_table: must have one row for each of query, 3: got 2",
    ),
    "row too short": (
        {"block_table": [[5], *ROW[1:]]},
        r"block_table\[0\]: must have 2 blocks for history \+ query = 11 positions \(2 ranks of 4 a block\): "
        r"got 1, of at most M = 3",
    ),
    "table too narrow": (
        {"table_width": 1},
        r"block_table\[0\]: must have 2 blocks for history \+ query = 11 positions .*: got 3, of at most M = 1",
    ),
    "block beyond the cache": (
        {"block_table": [[5, 8, 0], *ROW[1:]]},
        r"block_table\[0, 1\]: must be in 0\.\.7: got 8",
    ),
    "block below 0": ({"block_table": [ROW[0], [-1, 0, 0], ROW[2]]}, r"block_table\[1, 0\]: must be in 0\.\.7: got -1"),
    "block of a history without new tokens": (
        {"block_table": [*ROW[:2], [2147480000, 0, 0]]},
        r"block_table\[2, 0\]: must be in 0\.\.7: got 2147480000",
    ),
    "a request writes into its own history": (
        {"block_table": [[5, 5, 0], [3, 0, 0], ROW[2]]},
        r"block_table\[0\]: a block that is written must be in the tables once: got 5 again",
    ),
    "a length that is no integer": (
        {"query": [1.5, 1, 0]},
        r"query: each length must be an integer: got \[1\.5, 1, 0\]",
    ),
    "a length that is a bool": (
        {"history": (9, True, 7)},
        r"history: each length must be an integer: got \(9, True, 7\)",
    ),
    "two requests write to one block": (
        {"block_table": [[5, 3, 0], [3, 0, 0], ROW[2]]},
        r"block_table\[0\]: a block that is written must be in the tables once: got 3 again",
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_steps_that_are_refused(change):
    changes, message = REFUSED[change]
    with pytest.raises(InputError, match=f"^{message}$"):
        plan(**changes)


@pytest.mark.parametrize(
    "row",
    [
        [5, 3, 1.9],
        [5, float("nan"), 0],
        ["5", 3, 0],
        "530",
        [True, 3, 0],
        [None, 3, 0],
        5,
        torch.tensor([5.0, 3.0, 0.0]),
        torch.tensor([True, False, True]),
        [torch.tensor(True), 3, 0],
        np.array([5.0, 3.0, 0.0]),
        np.array([True, False, False]),
    ],
    ids=repr,
)
def test_blocks_that_are_no_integers_are_refused_and_not_rounded(row):
    """Behind what is needed too: what a step carries along unread is still a table of blocks."""
    with pytest.raises(InputError, match=r"^block_table\[0\]: each block must be an integer: got "):
        plan(block_table=[row, *ROW[1:]])


def test_integers_of_other_kinds_are_integers():
    plain, _ = plan()
    for kind in (torch.tensor, np.array, lambda rows: [np.array(row, dtype=np.int32) for row in rows]):
        given, _ = plan(block_table=kind(ROW), history=np.array(STEP["history"]), query=torch.tensor(STEP["query"]))
        assert torch.equal(given.block_table, plain.block_table) and torch.equal(given.slots, plain.slots)
        assert given.query_lengths == plain.query_lengths and set(map(type, given.query_lengths)) == {int}


# --- micro-batches ----------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=4),
    ranks=st.sampled_from(RANKS),
    first=st.integers(0, 12),
    padding=st.integers(0, 3),
)
def test_micro_batches_are_the_step_in_two(requests, ranks, first, padding):
    """The same tokens in the same rows; what the first brings is history of the second, by position."""
    history, query = [h for h, _ in requests], [q for _, q in requests]
    sizes = (first, max(sum(query) - first, 0) + padding)
    sharding = Sharding(ranks=ranks, interleave=2, block_size=4)
    width = sharding.blocks(26)
    table = [list(range(b * width, (b + 1) * width)) for b in range(len(requests))]
    given = {"history": history, "query": query, "block_table": table}
    shape = {"blocks": width * len(requests), "requests": 4, "table_width": width}
    whole = plan_batch(sharding, tokens=sum(sizes), **given, **shape)
    parts = plan_parts(sharding, tokens=sizes, **given, **shape)
    real = sum(query)
    for rank, (one, (before, behind)) in enumerate(zip(whole, parts, strict=True)):
        for name in ("positions", "slots"):
            both = torch.cat([getattr(before, name), getattr(behind, name)])
            assert len(both) == sum(sizes) and torch.equal(both[:real], getattr(one, name)[:real])
        assert (behind.slots[max(real - first, 0) :] == -1).all()
        assert torch.equal(before.block_table, one.block_table) and torch.equal(behind.block_table, one.block_table)
        assert before.history_lengths == one.history_lengths
        assert [a + b for a, b in zip(before.query_lengths, behind.query_lengths, strict=True)] == [*one.query_lengths]
        brought = [start + new for start, new in zip(history, before.query_lengths, strict=False)]
        assert [*behind.history_lengths[: len(requests)]] == [sharding.local_lengths(n)[rank] for n in brought]


def test_a_shape_says_whether_a_step_is_split():
    given = {name: STEP[name] for name in ("history", "query", "block_table")}
    sizes = {name: STEP[name] for name in ("blocks", "requests", "table_width", "tokens")}
    sharding = Sharding(ranks=2, interleave=2, block_size=4)
    whole, split = (plan_step(sharding, StepShape(split=s, **sizes), **given) for s in (None, "attention"))
    assert [tuple(batch.query_lengths for batch in batches) for batches in (whole, split[0])] == [
        ((2, 1, 0, 0),) * 2,
        ((2, 1, 0, 0), (0, 0, 0, 0)),
    ]
    assert [len(batch.positions) for batch in split[0]] == [3, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": (2, 0)}, r"query: the sum must be at most T = 2 tokens: got 3, from \(2, 1, 0\)"),
        ({"query": (2, -1, 0)}, "query: each length must be at least 0: got"),
        (
            {"tokens": (2, 3), "block_table": [[5, 3], [5], [1, 1]]},
            r"block_table\[1\]: a block that is written must be in",
        ),
        ({"history": (9, 0)}, "history: must have one length for each of query, 3: got 2"),
        (
            {"block_table": [[5, 3], [5, 3], [1, 1]]},
            r"block_table\[1\]: a block that is written must be in the tables",
        ),
    ],
)
def test_micro_batches_that_are_refused(change, message):
    """As a step is, and before anything has been planned."""
    with pytest.raises(InputError, match=message):
        plan_parts(Sharding(ranks=2, interleave=2, block_size=4), **STEP | {"tokens": (3, 2)} | change)
