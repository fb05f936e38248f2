"""Which ranks of a process have the very same tensor of a value, so that what is made of it is made once for them.

Ranks have in common a parameter that is equal on all, an input that is given to
all as one tensor, what an op that every rank does for itself makes of nothing
else, and what a collective gives to all of its group.  What a rank writes is
its own from beginning to end.

Which inputs are one tensor only a call can tell.  Rows are written for those
that ranks of a replica have in common as a rule; a call that brings others, of
those that this hangs on, has rows of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from mla_fx.backends.prepared import Prepared
from mla_fx.backends.rows import Body
from mla_fx.backends.world import InProcess
from mla_fx.effects import Aval, Launch, Op, Program
from mla_fx.effects.passes import definition

if TYPE_CHECKING:
    from mla_fx.backends.backend import Backend

#: For each rank here, in order, the first one that has the same tensor; all for themselves: (0, 1, 2, ...).
Sharers = tuple[int, ...]


def shares_work(backend: "Backend") -> bool:
    """Whether the ranks of a backend do once what is the same on all: on the host, where nothing is queued.

    Not where they are to be `apart`, and not through a world of somebody's own, which may have a say in what arrives.
    """
    plain = type(backend.world) is InProcess and not backend.device.has_streams
    return plain and not backend.apart and len(backend.here) > 1


def apart(backend: "Backend") -> Sharers:
    """Every rank for itself."""
    return tuple(range(len(backend.here)))


def together(*of: Sequence[Any]) -> Sharers:
    """Who has the same of everything: each of `of` has an entry for each rank, equal where they share it.

    >>> together((0, 0, 2, 2), (0, 1, 1, 1))
    (0, 1, 2, 2)
    """
    first: dict[Any, int] = {}
    return tuple(first.setdefault(mine, rank) for rank, mine in enumerate(zip(*of, strict=True)))


def sharers(
    program: Program, backend: "Backend", prepared: Prepared | None, unlike: frozenset[str] = frozenset()
) -> dict[str, Sharers]:
    """Who shares each value of a program; inputs but those `unlike` are one tensor on the ranks of a replica."""
    root, avals, own = program.memory(), program.avals(), apart(backend)
    written = {root[launch.operands[k]] for launch in program.launches for k in launch.op.written()}
    given = together([backend.layout.replica(rank) for rank in backend.here])
    found: dict[str, Sharers] = {}
    for put in program.inputs:
        if put.role == "parameter" and prepared is not None:
            found[put.name] = together([id(leaf) for leaf in prepared.leaves[put.name]])
        else:
            found[put.name] = own if root[put.name] in written or put.name in unlike else given
    for launch in program.launches:
        of = own if any(root[name] in written for name in launch.results) else _of(launch, backend, avals, found)
        found.update(dict.fromkeys(launch.results, of))
    return found


def of_launch(launch: Launch, found: Mapping[str, Sharers], own: Sharers) -> Sharers:
    """The ranks that one call of a local rule is for."""
    return found[launch.results[0]] if launch.results else own


def relied(program: Program, found: Mapping[str, Sharers], own: Sharers) -> list[str]:
    """The inputs, but parameters, that ranks must have in common for what `found` says to be so."""
    taken = {
        name
        for launch in program.launches
        if not launch.op.communicates and of_launch(launch, found, own) != own
        for name in launch.operands
    }
    return [put.name for put in program.inputs if put.role != "parameter" and put.name in taken]


def _of(launch: Launch, backend: "Backend", avals: Mapping[str, Aval], found: Mapping[str, Sharers]) -> Sharers:
    """Who shares the results of a launch that writes nothing."""
    if launch.op.communicates:
        group = launch.op.group_of()
        if group is None or not launch.op.alike:
            return apart(backend)
        return together([backend.layout.members(group.name, rank) for rank in backend.here])
    if _ranked(launch.op, [avals[name] for name in launch.operands], backend):
        return apart(backend)
    return together(*(found[name] for name in launch.operands))


def _ranked(op: Op, avals: Sequence[Aval], backend: "Backend") -> bool:
    """Whether what an op does depends on the rank that does it."""
    if op.group_of() is not None:
        return True
    if type(op) in backend.table.rules:
        return False
    step = definition(op, avals)
    of = step.avals()
    return any(_ranked(part.op, [of[name] for name in part.operands], backend) for part in step.equations)


@frozen(eq=False)
class Sharing:
    """The body of a program whose ranks share work, while they have inputs in common; see the top of this file.

    `pairs` are, by input that this hangs on, the places of two leaves that must be one; `write` gives the body for
    inputs that are not.
    """

    pairs: Mapping[str, Sequence[tuple[int, int]]]
    write: Callable[[frozenset[str]], Body]
    bodies: dict[frozenset[str], Body] = field(factory=dict)

    @classmethod
    def of(
        cls, program: Program, backend: "Backend", found: Mapping[str, Sharers], write: Callable[[frozenset[str]], Body]
    ) -> "Sharing":
        """Of a program whose values are shared as `found` says."""
        inputs = [put.name for put in program.inputs if put.role != "parameter"]
        count = len(backend.here)
        pairs = {
            name: [(inputs.index(name) * count + first, inputs.index(name) * count + k) for k, first in of if first < k]
            for name in relied(program, found, apart(backend))
            for of in [list(enumerate(found[name]))]
        }
        return cls(pairs, write)

    def __call__(self, leaves: list[Any]) -> Sequence[Any]:
        """See `Body`."""
        return self.chosen(leaves)(leaves)

    def chosen(self, leaves: Sequence[Any]) -> Body:
        """The body for what these leaves have in common."""
        unlike = [name for name, pairs in self.pairs.items() if not all([leaves[a] is leaves[b] for a, b in pairs])]
        key = frozenset(unlike)
        if key not in self.bodies:
            self.bodies[key] = self.write(key)
        return self.bodies[key]
