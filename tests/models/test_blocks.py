"""Blocks: handed out, kept and taken back, against a plain model; a refusal changes nothing."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mla_fx import Sharding
from mla_fx.effects import InputError
from mla_fx.models import BlockManager, OutOfBlocksError

NAMES = ["a", "b", "c", ("d", 1)]


def need(length, ranks, size):
    """Blocks of `ranks * size` positions, counted one after the other."""
    count = 0
    while count * ranks * size < length:
        count += 1
    return count


def state(manager):
    """All that callers can see."""
    tables = {}
    for name in NAMES:
        try:
            tables[name] = manager.table(name)
        except InputError:
            continue
    return manager.available, tables


class Blocks(RuleBasedStateMachine):
    """`held` is the plain model: the blocks of every request, as the manager told them."""

    @initialize(ranks=st.integers(1, 3), size=st.integers(1, 4), blocks=st.integers(1, 8))
    def begin(self, ranks, size, blocks):
        self.ranks, self.size, self.blocks = ranks, size, blocks
        self.manager = BlockManager(Sharding(ranks=ranks, block_size=size), blocks=blocks)
        self.held = {}

    @property
    def left(self):
        return self.blocks - sum(map(len, self.held.values()))

    def refused(self, error, message, call, *arguments):
        before = state(self.manager)
        with pytest.raises(InputError, match=message) as raised:
            call(*arguments)
        assert raised.type is error
        assert state(self.manager) == before

    @rule(which=st.integers(0, 3), length=st.integers(0, 30))
    def allocate(self, which, length):
        fresh = [name for name in NAMES if name not in self.held]
        wanted = need(length, self.ranks, self.size)
        if not fresh:
            message = r"^request: must not hold blocks already: got "
            self.refused(InputError, message, self.manager.allocate, NAMES[which], length)
        elif wanted > self.left:
            self.too_many(wanted, self.manager.allocate, fresh[0], length)
        else:
            self.held[fresh[0]] = self.manager.allocate(fresh[0], length)
            assert len(self.held[fresh[0]]) == wanted

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 3), length=st.integers(0, 60))
    def append(self, which, length):
        name, old = sorted(self.held.items(), key=str)[which % len(self.held)]
        more = max(need(length, self.ranks, self.size) - len(old), 0)
        if more > self.left:
            self.too_many(more, self.manager.append, name, length)
        else:
            new = self.manager.append(name, length)
            assert new[: len(old)] == old
            assert len(new) == len(old) + more
            self.held[name] = new

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 3))
    def free(self, which):
        name = sorted(self.held, key=str)[which % len(self.held)]
        self.manager.free(name)
        del self.held[name]

    @rule(name=st.sampled_from(NAMES), length=st.sampled_from([0, 5, -1, 1.5, None]))
    def wrong_calls(self, name, length):
        known, manager = name in self.held, self.manager
        if length in (0, 5):
            call = manager.allocate if known else manager.append
            message = r"^request: must (not hold blocks already|hold blocks): got "
        else:
            call = manager.append if known else manager.allocate
            message = r"^length: must be an integer of at least 0: got "
        self.refused(InputError, message, call, name, length)
        if not known:
            self.refused(InputError, r"^request: must hold blocks: got ", manager.free, name)

    def too_many(self, more, call, name, length):
        message = rf"^blocks: request .* needs {more} more, and {self.left} of {self.blocks} are free$"
        self.refused(OutOfBlocksError, message, call, name, length)

    @invariant()
    def nothing_is_held_twice_and_nothing_is_lost(self):
        if not hasattr(self, "held"):
            return
        available, tables = state(self.manager)
        assert tables == self.held
        given = [block for table in self.held.values() for block in table]
        assert len(set(given)) == len(given)
        assert set(given) <= set(range(self.blocks))
        assert available == self.left


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def test_all_blocks_can_be_held_again_and_again():
    manager = BlockManager(Sharding(block_size=2), blocks=5)
    for _ in range(3):
        assert sorted(manager.allocate("a", 4) + manager.allocate("b", 6)) == [0, 1, 2, 3, 4]
        assert manager.available == 0
        manager.free("a")
        manager.free("b")


def test_a_table_that_was_told_does_not_change():
    manager = BlockManager(Sharding(block_size=2), blocks=5)
    first = manager.allocate("a", 2)
    table = manager.table("a")
    manager.append("a", 10)
    assert first == table == manager.table("a")[:1]
    assert len(table) == 1


@pytest.mark.parametrize("blocks", [0, -1, 2.0, None])
def test_counts_that_are_refused(blocks):
    with pytest.raises(InputError, match=rf"^blocks: must be an integer of at least 1: got {blocks!r}$"):
        BlockManager(Sharding(), blocks=blocks)


def test_refusals_in_full():
    manager = BlockManager(Sharding(ranks=2, block_size=2), blocks=2)
    manager.allocate("a", 1)
    with pytest.raises(OutOfBlocksError, match=r"^blocks: request 'b' needs 2 more, and 1 of 2 are free$"):
        manager.allocate("b", 5)
    with pytest.raises(InputError, match=r"^request: must not hold blocks already: got 'a'$"):
        manager.allocate("a", 1)
    with pytest.raises(InputError, match=r"^request: must hold blocks: got 'b'$"):
        manager.table("b")
    with pytest.raises(InputError, match=r"^length: must be an integer of at least 0: got -3$"):
        manager.append("a", -3)
