"""A plan of memory: where each value of a program lies in one block, from its launch to its drop.

A block for each stream that values are allocated on: what is dropped there goes to later launches there, as the law has
it (`mla_fx.effects.check`, rule 3), and to nobody else.  So the plan holds in every execution of a legal program, and
from step to step: the main stream has seen the end of all others.  What is kept for another stream goes to nobody
any more, since a drop does not say when that stream is done; what nothing drops lies there to the end.

Each value takes the smallest gap that has room for it, in issue order: best fit, as an allocator does, which may need
more than the peak (`mla_fx.effects.cost`), since a gap may be too small for what comes.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping

from attrs import define, field, frozen

from mla_fx.effects.program import Drop, Keep, Launch, Program

#: Bytes that every place starts at a multiple of: a line of a CPU's cache, and the widest vector.
ALIGNED = 64


@frozen
class Place:
    """Where a value lies: bytes from `start` of the block of `stream`."""

    stream: str
    start: int
    bytes_: int


@frozen
class Plan:
    """The places of all values that launches allocate, by name, and the bytes of each stream's block."""

    places: Mapping[str, Place]
    blocks: Mapping[str, int]

    @property
    def bytes_(self) -> int:
        """Of all blocks."""
        return sum(self.blocks.values())


def plan(program: Program) -> Plan:
    """Places for the values of a legal program; raises `ShapeError` or `KeyError` for one without shapes.

    >>> from mla_fx.effects import Aval, Drop, Input, Launch, Program, ops
    >>> add = [Launch("main", ops.Add(), (x, "x"), (y,)) for x, y in ("xa", "ab", "bc")]
    >>> x = Input("x", Aval((4, 8), "fp32"))
    >>> found = plan(Program((x,), ("c",), (add[0], add[1], Drop("a"), add[2], Drop("b"))))
    >>> [(name, place.start) for name, place in found.places.items()], found.bytes_
    ([('a', 0), ('b', 128), ('c', 0)], 256)
    """
    avals, root = program.avals(), program.memory()
    kept = {root[effect.value] for effect in program.effects if isinstance(effect, Keep)}
    blocks: dict[str, Block] = defaultdict(Block)
    places: dict[str, Place] = {}
    for effect in program.effects:
        match effect:
            case Launch():
                for name in effect.results:
                    if root[name] == name:
                        bytes_ = avals[name].bytes_
                        places[name] = Place(effect.stream, blocks[effect.stream].take(bytes_), bytes_)
            case Drop():
                memory = root[effect.value]
                if memory in places and memory not in kept:
                    place = places[memory]
                    blocks[place.stream].give(place.start, place.bytes_)
    return Plan(places, {stream: block.end for stream, block in blocks.items()})


@define(eq=False)
class Block:
    """Bytes up to `end`, which grows, and the gaps between what is taken: start and size, sorted, none beside one."""

    end: int = 0
    gaps: list[tuple[int, int]] = field(factory=list)

    def take(self, bytes_: int) -> int:
        """Where so many bytes lie from now on."""
        size = -(-bytes_ // ALIGNED) * ALIGNED
        if not size:
            return 0
        fitting = [(room, start) for start, room in self.gaps if room >= size]
        if fitting:
            room, start = min(fitting)
        elif self.gaps and sum(self.gaps[-1]) == self.end:
            start, room = self.gaps[-1]  # which the block grows behind
        else:
            start, room = self.end, 0
        if room:
            at = bisect_left(self.gaps, (start, room))
            self.gaps[at : at + 1] = [(start + size, room - size)] if room > size else []
        self.end = max(self.end, start + size)
        return start

    def give(self, start: int, bytes_: int) -> None:
        """So many bytes from `start` are free again."""
        size = -(-bytes_ // ALIGNED) * ALIGNED
        if not size:
            return
        at = bisect_left(self.gaps, (start, size))
        first, last, end = at, at, start + size
        if at and sum(self.gaps[at - 1]) == start:
            first, start = at - 1, self.gaps[at - 1][0]
        if at < len(self.gaps) and self.gaps[at][0] == end:
            last, end = at + 1, sum(self.gaps[at])
        self.gaps[first:last] = [(start, end - start)]
