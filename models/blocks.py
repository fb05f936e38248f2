"""Which request holds which blocks of the paged caches, and which blocks of others it can share.

A block of the table stands for W * block_size positions, block_size on each
rank, so one table serves all ranks and all layers.  A call that cannot be
served raises and changes nothing.

What a block holds depends on its tokens and on all before them, so a block that
is full has a name: the hash of its tokens and of the name before it.  A new
request takes over the blocks that are named as its own first ones would be.
Nobody writes to them any more: they are full, and what follows goes into blocks
that only one request holds.  A named block that no request holds keeps its
contents until the memory is needed; the one that was longest unused goes first,
the end of a text before its beginning.  Source: vLLM's automatic prefix caching.
"""

import hashlib
from array import array
from collections.abc import Hashable, Iterator, Sequence
from itertools import count, islice

from attrs import define, field

from mla_fx.effects import InputError
from mla_fx.sharding import Sharding


class OutOfBlocksError(InputError):
    """More blocks are asked for than are free, or than there are.  Nobody has lost any."""


@define
class _Held:
    """The blocks of a request, the names of its first ones, and how many positions others had filled."""

    blocks: list[int]
    names: list[bytes]
    found: int


@define
class BlockManager:
    """Hands out `blocks` blocks.

    `ahead` is how many tokens behind a block its contents depend on too: 1 where a prediction module, which takes each
    position with the token that follows, keeps its cache in the same blocks.  `asked` and `found` count the positions
    that were looked for and those that were there.

    >>> manager = BlockManager(Sharding(ranks=2, block_size=4), blocks=3)
    >>> manager.allocate("a", 9)
    (0, 1)
    >>> manager.append("a", 17)
    (0, 1, 2)
    >>> manager.free("a"); manager.available
    3
    >>> manager.allocate("b", 9, range(9)); manager.fill("b", range(9), 9); manager.free("b")
    (0, 1)
    >>> manager.allocate("c", 9, range(9)), manager.shared("c")
    ((0, 1), 8)
    """

    sharding: Sharding
    blocks: int
    ahead: int = 0
    asked: int = field(default=0, init=False)
    found: int = field(default=0, init=False)
    _free: list[int] = field(init=False)
    _requests: dict[Hashable, _Held] = field(factory=dict, init=False)
    _holders: dict[int, int] = field(factory=dict, init=False)  # how many requests hold a block
    _named: dict[bytes, int] = field(factory=dict, init=False)
    _names: dict[int, bytes] = field(factory=dict, init=False)
    _idle: dict[int, None] = field(factory=dict, init=False)  # named, held by nobody; the longest unused first

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.blocks, int) or self.blocks < 1:
            raise InputError(f"blocks: must be an integer of at least 1: got {self.blocks!r}")
        self._free = list(reversed(range(self.blocks)))

    @property
    def available(self) -> int:
        """How many blocks no request holds."""
        return len(self._free) + len(self._idle)

    @property
    def unit(self) -> int:
        """How many positions a block stands for, those of all ranks."""
        return self.sharding.ranks * self.sharding.block_size

    def allocate(self, request: Hashable, length: int, tokens: Sequence[int] = ()) -> tuple[int, ...]:
        """Blocks for the `length` positions of a new request.

        `tokens` are those of its first positions; blocks that hold them already are shared, but never all positions:
        the last token is always left to process.
        """
        if request in self._requests:
            raise InputError(f"request: must not hold blocks already: got {request!r}")
        need = self._need(length)
        names, shared = self._known(tokens[:length])
        idle = [block for block in shared if block in self._idle]
        self._enough(request, need - len(shared), self.available - len(idle))
        for block in idle:
            del self._idle[block]
        for block in shared:
            self._holders[block] = self._holders.get(block, 0) + 1
        held = _Held([*shared, *self._take(need - len(shared))], names, len(shared) * self.unit)
        self._requests[request] = held
        self.asked += len(tokens)
        self.found += held.found
        return tuple(held.blocks)

    def append(self, request: Hashable, length: int) -> tuple[int, ...]:
        """All blocks of a request that now has `length` positions; it keeps those it has."""
        held = self._of(request).blocks
        more = max(self._need(length) - len(held), 0)
        self._enough(request, more, self.available)
        held += self._take(more)
        return tuple(held)

    def fill(self, request: Hashable, tokens: Sequence[int], length: int) -> None:
        """The first `length` positions of a request are in the caches for good: their full blocks can be shared.

        `tokens` are those of the request, with those behind `length` that its contents depend on.
        """
        held = self._of(request)
        full = min(length, len(tokens) - self.ahead) // self.unit
        names = islice(self._chain(tokens, held.names), max(full - len(held.names), 0))
        for block, name in zip(held.blocks[len(held.names) :], list(names), strict=False):
            held.names.append(name)
            if name not in self._named:  # where another block holds the same already, that one is shared
                self._named[name], self._names[block] = block, name

    def shared(self, request: Hashable) -> int:
        """How many of a request's first positions were in the caches when it came."""
        return self._of(request).found

    def table(self, request: Hashable) -> tuple[int, ...]:
        """The blocks of a request, in the order of its positions."""
        return tuple(self._of(request).blocks)

    def free(self, request: Hashable) -> None:
        """Take back all blocks of a request that no other one holds."""
        held = self._of(request)
        del self._requests[request]
        for block in reversed(held.blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._names:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _known(self, tokens: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """Names and blocks that hold the first of these tokens, without the last one."""
        names: list[bytes] = []
        blocks: list[int] = []
        for name in islice(self._chain(tokens, ()), max(len(tokens) - max(1, self.ahead), 0) // self.unit):
            if name not in self._named:
                break
            names.append(name)
            blocks.append(self._named[name])
        return names, blocks

    def _chain(self, tokens: Sequence[int], names: Sequence[bytes]) -> Iterator[bytes]:
        """The names of the blocks of these tokens behind those that are known."""
        last = names[-1] if names else b""
        for number in count(len(names)):
            start = number * self.unit
            inside = array("q", tokens[start : start + self.unit + self.ahead])
            last = hashlib.blake2b(last + inside.tobytes(), digest_size=32).digest()
            yield last

    def _need(self, length: int) -> int:
        if not isinstance(length, int) or length < 0:
            raise InputError(f"length: must be an integer of at least 0: got {length!r}")
        return self.sharding.blocks(length)

    def _enough(self, request: Hashable, more: int, available: int) -> None:
        if more > available:
            raise OutOfBlocksError(
                f"blocks: request {request!r} needs {more} more, and {available} of {self.blocks} are free"
            )

    def _take(self, count: int) -> list[int]:
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def _evict(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block], self._named[self._names.pop(block)]
        return block

    def _of(self, request: Hashable) -> _Held:
        if request not in self._requests:
            raise InputError(f"request: must hold blocks: got {request!r}")
        return self._requests[request]
