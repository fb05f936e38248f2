"""What changes at every step: lengths, positions, slots and block tables, checked as they are made.

Nothing of this is baked into a program; one compiled program serves every
batch of its shape.
"""

from collections import Counter
from collections.abc import Sequence
from operator import index
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from mla_fx.effects import InputError
from mla_fx.sharding import Sharding, positions_of

#: Leaves on the device and on the host: tensors and tuples of lengths; `Value` or `Aval` while a step is described.
Leaf = TypeVar("Leaf")
Lengths = TypeVar("Lengths")


class Batch(NamedTuple, Generic[Leaf, Lengths]):
    """One rank's view of the requests of a step, padded to T tokens and B requests.

    `positions` int64 [T], `slots` int64 [T] (-1: not this rank's), `block_table` int32 [B, M],
    `query_lengths` B host integers, `history_lengths` B host integers (of this rank's shard).
    """

    positions: Leaf
    slots: Leaf
    block_table: Leaf
    query_lengths: Lengths
    history_lengths: Lengths


#: A batch that can be run.
Planned = Batch[torch.Tensor, tuple[int, ...]]


def plan_batch(
    sharding: Sharding,
    *,
    history: Sequence[int],
    query: Sequence[int],
    block_table: torch.Tensor | Sequence[Sequence[int]],
    blocks: int,
    tokens: int,
    requests: int,
    table_width: int,
) -> list[Planned]:
    """The batches of all ranks for one step.

    `history[b]` tokens of request b are in the cache already, `query[b]` are
    new.  `block_table` gives request b's blocks, one for each W * block_size
    positions; entries behind what history + query need are not looked at.
    `blocks` is the number of blocks in a rank's cache; `tokens`, `requests` and
    `table_width` are the T, B and M of the program, to which the batch is padded.
    Raises `InputError` naming the field.
    """
    history, query = _lengths(history, query, tokens)
    if len(query) > requests:
        raise InputError(f"query: must have at most B = {requests} requests: got {len(query)}")
    table = _table(sharding, history, query, block_table, blocks, requests, table_width)

    padding = tokens - sum(query)
    positions = torch.tensor(positions_of(history, query) + [0] * padding, dtype=torch.int64)
    real = positions[: sum(query)]
    request = torch.repeat_interleave(torch.arange(len(query)), torch.tensor(query, dtype=torch.int64))
    rows = table[request, real // (sharding.block_size * sharding.ranks)].to(torch.int64)
    short = (0,) * (requests - len(query))
    lengths = query + short  # one object for all ranks, which is looked at once
    local = [sharding.local_lengths(length) for length in history]
    return [
        Batch(
            positions,
            torch.cat([slots, torch.full((padding,), -1, dtype=torch.int64)]),
            table,
            lengths,
            tuple(of_ranks[rank] for of_ranks in local) + short,
        )
        for rank, slots in enumerate(sharding.slots(real, rows))
    ]


def whole(batch: Planned) -> Planned:
    """A batch whose every token is a request's: those of padding are new tokens of requests behind all others.

    They have no history, and no slot.  Where there is a request for each token it has that one, else the first that is
    free has all.  So a step can be captured: what is done for each request is decided by lengths alone.
    Raises `InputError` where no request is free.
    """
    left, lengths = len(batch.positions) - sum(batch.query_lengths), list(batch.query_lengths)
    behind = max((b + 1 for b, length in enumerate(lengths) if length), default=0)
    free = [b for b in range(behind, len(lengths)) if not batch.history_lengths[b]]
    if left and not free:
        raise InputError(f"requests: one must be free for {left} tokens of padding: got {len(lengths)}, all taken")
    for b in free[:left] if len(free) >= left else free[:1]:
        lengths[b] = 1 if len(free) >= left else left
    return batch._replace(query_lengths=tuple(lengths))


def plan_parts(
    sharding: Sharding,
    *,
    history: Sequence[int],
    query: Sequence[int],
    tokens: Sequence[int],
    **sizes: Any,
) -> list[tuple[Planned, ...]]:
    """The micro-batches of all ranks for one step, by `plan_batch` each, with `tokens` for each instead of T.

    The new tokens stay in their order: the first micro-batch has as many as it holds, the next goes on.  A request
    that is cut has its first new tokens in one, and in the next these are history.  `sizes` are as there.
    """
    history, query = _lengths(history, query, sum(tokens))
    left, plans = query, []
    for count in tokens:
        own, room = [], count
        for length in left:
            own.append(min(length, room))
            room -= own[-1]
        before = [start + new - rest for start, new, rest in zip(history, query, left, strict=True)]
        plans.append(plan_batch(sharding, history=before, query=own, tokens=count, **sizes))
        left = tuple(length - taken for length, taken in zip(left, own, strict=True))
    return list(zip(*plans, strict=True))


def _lengths(history: Sequence[int], query: Sequence[int], tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """History and query, checked: a pair for each request, none negative, no more new tokens than there is room for."""
    query, history = _integers("query", "length", query), _integers("history", "length", history)
    if len(history) != len(query):
        raise InputError(f"history: must have one length for each of query, {len(query)}: got {len(history)}")
    for name, lengths in (("history", history), ("query", query)):
        if min(lengths, default=0) < 0:
            raise InputError(f"{name}: each length must be at least 0: got {lengths}")
    if sum(query) > tokens:
        raise InputError(f"query: the sum must be at most T = {tokens} tokens: got {sum(query)}, from {query}")
    return history, query


def _table(
    sharding: Sharding,
    history: tuple[int, ...],
    query: tuple[int, ...],
    given: torch.Tensor | Sequence[Sequence[int]],
    blocks: int,
    requests: int,
    width: int,
) -> torch.Tensor:
    if len(given) != len(query):
        raise InputError(f"block_table: must have one row for each of query, {len(query)}: got {len(given)}")
    table = torch.zeros((requests, width), dtype=torch.int32)
    reached: Counter[int] = Counter()
    written: list[tuple[int, int]] = []  # request, block
    for b, row in enumerate(given):
        ids = _integers(f"block_table[{b}]", "block", row)
        total = history[b] + query[b]
        need = sharding.blocks(total) if query[b] or history[b] else 0
        if need > min(len(ids), width):
            raise InputError(
                f"block_table[{b}]: must have {need} blocks for history + query = {total} positions "
                f"({sharding.ranks} ranks of {sharding.block_size} a block): got {len(ids)}, of at most M = {width}"
            )
        for column, block in enumerate(ids[:need]):
            if not 0 <= block < blocks:
                raise InputError(f"block_table[{b}, {column}]: must be in 0..{blocks - 1}: got {block}")
        reached.update(ids[:need])
        if query[b]:
            written += [(b, block) for block in ids[history[b] // (sharding.block_size * sharding.ranks) : need]]
        # Entries behind the needed ones are carried along unread, clipped to what int32 holds.
        kept = [min(max(block, -(2**31)), 2**31 - 1) for block in ids[:width]]
        table[b, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
    for b, block in written:
        if reached[block] > 1:  # blocks that are only read may be shared, as a common prefix is
            raise InputError(f"block_table[{b}]: a block that is written must be in the tables once: got {block} again")
    return table


def _integers(name: str, what: str, given: torch.Tensor | Sequence[int]) -> tuple[int, ...]:
    """Integers of any kind, in a row; a bool is none, and nothing is rounded."""
    try:
        values = list(given.tolist() if isinstance(given, torch.Tensor) else given)
        if any(type(value) is bool or getattr(value, "dtype", None) is torch.bool for value in values):
            raise TypeError
        return tuple(index(value) for value in values)
    except TypeError:
        raise InputError(f"{name}: each {what} must be an integer: got {given!r}") from None
