"""Captured steps of a runner: of which sizes, how a step is padded to one, and the session that they are.

A step that decodes goes as the next larger size, if there is one, else as it
is; a step that fills in a prompt always does.  Its tokens of padding are new
tokens of requests behind all others, without history and without a slot.  A
size has two forms:

    single   every request has one new token, which the program is made for: only the lengths of histories change
    mixed    any lengths, as drafts have them, and a request more than the runner's for all padding

Where a captured step costs what its block table has room for, as on CUDA, a size
may have tables of several widths, and a step goes with the narrowest that its
longest request has room in.

All forms are captured before requests are served, the largest size first: the
others find workspaces large enough, and in the pool the memory that it lets go.
For all that, captured programs share memory with each other, and caches and
workspaces with whatever runs eagerly between them, in ways that their own law
does not see.  So what there is is put down as a session, every program behind
every one, and the prediction module behind every step whose hidden states it
may take; and that is held against its law.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from attrs import define, evolve, field, frozen

from mla_fx.batch import whole
from mla_fx.decode import StepShape
from mla_fx.effects import InputError, Program
from mla_fx.effects.check_session import check_session
from mla_fx.effects.session import (
    Action,
    Capture,
    Fill,
    Member,
    Read,
    Reserve,
    Run,
    Session,
    every_order,
    in_turn,
    turn,
)
from mla_fx.effects.session_memory import facts_of

#: The input of what drafts: hidden states of the step before, the second output of every program here.
HIDDEN: Final = "hidden"
#: Columns of block tables, the most first; None for as many as a runner's have.
Widths = Sequence[int | None]


def sizes(given: Iterable[int]) -> tuple[int, ...]:
    """Token counts, the largest first; raises `InputError` for one that is none."""
    found = sorted(set(given), reverse=True)
    for size in found:
        if type(size) is not int or size < 1:
            raise InputError(f"capture: each size must be an integer of at least 1: got {size!r}")
    return tuple(found)


@frozen
class Form:
    """What a captured step is of: so many tokens, one for each request or any, tables of so many columns or of all."""

    tokens: int
    single: bool
    columns: int | None = None

    def shape(self, shape: StepShape) -> StepShape:
        """The shape of the program, from the runner's."""
        requests, width = self.tokens if self.single else shape.requests + 1, self.columns or shape.table_width
        return evolve(shape, tokens=self.tokens, requests=requests, table_width=width)

    def program(self, program: Program) -> Program:
        """The program made for the lengths that do not change."""
        if not self.single:
            return program
        return program.with_fixed({"batch.query_lengths": (1,) * self.tokens})


def filled(batch: Any) -> Any:
    """A batch, or one for each micro-batch, with padding as requests."""
    return whole(batch) if hasattr(batch, "query_lengths") else tuple(map(whole, batch))


def form_of(
    sizes: Sequence[int], lengths: Sequence[Sequence[int]], *, split: bool, widths: Widths = (None,), columns: int = 0
) -> Form | None:
    """The form for the new tokens of each replica's requests, None where no size has room for them.

    `columns` are those that the longest request needs, `widths` those there are, the widest first.  Micro-batches cut a
    step anywhere, so there lengths change.
    """
    most = max(sum(mine) for mine in lengths)
    room = [size for size in sizes if size >= max(most, 2 if split else 1)]
    if not room or not most:
        return None
    width = [one for one in widths if one is None or one >= columns][-1]
    return Form(room[-1], not split and all(length == 1 for mine in lengths for length in mine), width)


def forms(sizes: Sequence[int], *, split: bool, drafts: bool, widths: Widths = (None,)) -> list[Form]:
    """What there is to capture, the largest first; `drafts`: for steps that verify drafts, too."""
    kinds = [False] if split else [True, False] if drafts else [True]
    room = [size for size in sizes if size >= (2 if split else 1)]
    return [Form(size, single, width) for size in room for width in widths for single in kinds]


@define(eq=False)
class Captures:
    """What a runner has captured, by key, in this order; whatever runs beside it; what has been held against the law.

    Of programs that run eagerly there is one of each sort: what the law asks of them is the same.
    """

    members: dict[Any, Member] = field(factory=dict)
    everybody: list[Member] = field(factory=list)
    sorts: set[Any] = field(factory=set)
    known: set[Any] = field(factory=set)
    checked: int = 0
    gave: dict[Any, torch.Tensor] = field(factory=dict)  # key -> the memory that its hidden states lie in
    newest: Any = None  # the hidden states that the last captured step gave

    def add(self, key: Any, run: Any, *, captured: bool) -> None:
        """Take in an executable that has captured its program, or that has run for the first time."""
        if key in self.known:
            return
        self.known.add(key)
        name, room = f"{key[0]}{len(self.everybody)}", tuple(sorted(run.rooms.items()))
        member = Member(name, run.program, pool="graphs" if captured else "", room=room)
        if captured:
            self.members[key] = member
        else:
            facts = facts_of(evolve(member, name=key[0]), {})
            sort = (key[0], facts.reads, facts.writes, facts.lanes, room)
            if sort in self.sorts:
                return
            self.sorts.add(sort)
        self.everybody.append(member)

    def check(self) -> None:
        """Raise `LawError` unless all may run, each behind each; pairs that have been checked are not again."""
        if len(self.everybody) > self.checked:
            check_session(session(self.everybody, known=self.checked))
        self.checked = len(self.everybody)

    def give(self, key: Any, hidden: Any) -> None:
        """A captured step has given hidden states, which hold until the next one."""
        self.gave[key], self.newest = hidden[0], hidden

    def hold(self, hidden: Any) -> None:
        """Raises `InputError` for hidden states that a captured step may have written since they were given."""
        if hidden is not self.newest and any(hidden[0] is memory for memory in self.gave.values()):
            raise InputError("hidden: must be read before the next captured step: got what an earlier one gave")


def session(members: Sequence[Member], *, known: int = 0) -> Session:
    """Members captured in this order, and whatever runs eagerly, each behind each but for pairs of the `known` first.

    States of one name are one memory, in programs of one kind.  What drafts takes the hidden states of each member, its
    second output, right behind that one's turn.
    """
    first = dict[str, int]()
    for member in sorted(members, key=lambda one: not one.pool):
        for name, size in member.room:
            first.setdefault(name, size)
    shared: dict[tuple[str, str], list[str]] = {}
    for member in members:
        kind = member.name.rstrip("0123456789")
        for name in member.program.states():
            shared.setdefault((kind, name), []).append(f"{member.name}.{name}")
    turns = [_turn(member) for member in members]
    actions = (
        *(Reserve(name, size) for name, size in first.items()),
        *(Capture(member.name) for member in members if member.pool),
        *every_order(turns, known=known),
    )
    drafting = [k for k, one in enumerate(members) if any(put.name == HIDDEN for put in one.program.inputs)]
    drafted = [
        one
        for number, given in enumerate(members)
        for other in drafting
        if max(number, other) >= known
        for one in (turns[number], _taking(turns[other], f"{given.name}.{given.program.outputs[1]}"))
    ]
    names = tuple(tuple(names) for names in shared.values() if len(names) > 1)
    return Session(tuple(members), (*actions, *in_turn(drafted, first=len(actions))), names)


def _turn(member: Member) -> tuple[Action, ...]:
    """A turn that reads what has memory of its own: states are read by whoever has them."""
    memory, states = member.program.memory(), member.program.states()
    actions = turn(member, captured=bool(member.pool))
    return tuple(one for one in actions if not (isinstance(one, Read) and memory[one.output] in states))


def _taking(actions: Sequence[Action], hidden: str) -> tuple[Action, ...]:
    """A turn that takes hidden states from an output."""
    return tuple(evolve(one, takes=((HIDDEN, hidden),)) if isinstance(one, Fill | Run) else one for one in actions)
