"""Which request holds which blocks of the paged caches.

A block of the table stands for W * block_size positions, block_size on each
rank, so one table serves all ranks and all layers.  A call that cannot be
served raises and changes nothing.
"""

from collections.abc import Hashable

from attrs import define, field

from mla_fx.effects import InputError
from mla_fx.sharding import Sharding


class OutOfBlocksError(InputError):
    """More blocks are asked for than are free, or than there are.  Nobody has lost any."""


@define
class BlockManager:
    """Hands out `blocks` blocks.

    >>> manager = BlockManager(Sharding(ranks=2, block_size=4), blocks=3)
    >>> manager.allocate("a", 9)
    (0, 1)
    >>> manager.append("a", 17)
    (0, 1, 2)
    >>> manager.free("a"); manager.available
    3
    """

    sharding: Sharding
    blocks: int
    _free: list[int] = field(init=False)
    _tables: dict[Hashable, list[int]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.blocks, int) or self.blocks < 1:
            raise InputError(f"blocks: must be an integer of at least 1: got {self.blocks!r}")
        self._free = list(reversed(range(self.blocks)))

    @property
    def available(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def allocate(self, request: Hashable, length: int) -> tuple[int, ...]:
        """Blocks for the `length` positions of a new request."""
        if request in self._tables:
            raise InputError(f"request: must not hold blocks already: got {request!r}")
        taken = self._take(request, self._need(length))
        self._tables[request] = taken
        return tuple(taken)

    def append(self, request: Hashable, length: int) -> tuple[int, ...]:
        """All blocks of a request that now has `length` positions; it keeps those it has."""
        held = self._of(request)
        held += self._take(request, self._need(length) - len(held))
        return tuple(held)

    def table(self, request: Hashable) -> tuple[int, ...]:
        """The blocks of a request, in the order of its positions."""
        return tuple(self._of(request))

    def free(self, request: Hashable) -> None:
        """Take back all blocks of a request."""
        held = self._of(request)
        del self._tables[request]
        self._free += reversed(held)

    def _need(self, length: int) -> int:
        if not isinstance(length, int) or length < 0:
            raise InputError(f"length: must be an integer of at least 0: got {length!r}")
        return self.sharding.blocks(length)

    def _take(self, request: Hashable, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfBlocksError(
                f"blocks: request {request!r} needs {count} more, and {len(self._free)} of {self.blocks} are free"
            )
        return [self._free.pop() for _ in range(count)]

    def _of(self, request: Hashable) -> list[int]:
        if request not in self._tables:
            raise InputError(f"request: must hold blocks: got {request!r}")
        return self._tables[request]
