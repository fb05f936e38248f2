"""A group of ranks, as a value: what a collective runs over, and what a share is a share of."""

from attrs import field, frozen

from mla_fx.effects.validate import boolean, integer, word


@frozen
class Group:
    """`size` ranks under a name, as in `Group("dcp", 8)`; prints like `dcp[8]`.

    Names are those of the field: "tp" for tensor, "dcp" for decode context, "ep" for expert parallelism.

    A rank runs all its collectives in one order, whatever their groups, since on a real transport two that ranks begin
    in two orders can wait for each other for ever.  `independent` declares that this group's transport goes on beside
    all others, whichever was begun first: its collectives are in one order among themselves alone.
    """

    name: str = field(validator=word)
    size: int = field(validator=integer(1))
    independent: bool = field(default=False, validator=boolean)

    def share(self, total: int) -> int:
        """How many of `total` a rank holds, padding included.

        >>> Group("tp", 4).share(10)
        3
        """
        return -(-total // self.size)

    def part(self, total: int, rank: int) -> slice:
        """Those of `total` that a rank really holds, none for the last ranks where there are few.

        >>> [Group("tp", 4).part(10, rank) for rank in range(4)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
        """
        size = self.share(total)
        return slice(min(rank * size, total), min((rank + 1) * size, total))

    def __str__(self) -> str:
        return f"{self.name}[{self.size}]{' independent' if self.independent else ''}"
