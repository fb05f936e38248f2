"""Captured steps of a runner: of which sizes, how a step is padded to one, and the session that they are.

A step that decodes goes as the next larger size, if there is one, else as it
is; a step that fills in a prompt always does.  Its tokens of padding are new
tokens of requests behind all others, without history and without a slot.  A
size has two forms, each captured when it is first wanted:

    single   every request has one new token, which the program is made for: only the lengths of histories change
    mixed    any lengths, as drafts have them, and a request more than the runner's for all padding

The largest size is captured first: the others find workspaces large enough, and
in the pool the memory that it lets go.  For all that, captured programs share
memory in ways that their own law does not see, so what is captured is put down
as a session, every program behind every one, and held against its law.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from mla_fx.batch import whole
from mla_fx.decode import StepShape
from mla_fx.effects import InputError, Program
from mla_fx.effects.check_session import check_session
from mla_fx.effects.session import Capture, Member, Reserve, Session, every_order, turn


def sizes(given: Iterable[int]) -> tuple[int, ...]:
    """Token counts, the largest first; raises `InputError` for one that is none."""
    found = sorted(set(given), reverse=True)
    for size in found:
        if type(size) is not int or size < 1:
            raise InputError(f"capture: each size must be an integer of at least 1: got {size!r}")
    return tuple(found)


@frozen
class Form:
    """What a captured step is of: so many tokens, and one for each request, or any."""

    tokens: int
    single: bool

    def shape(self, shape: StepShape) -> StepShape:
        """The shape of the program, from the runner's."""
        return evolve(shape, tokens=self.tokens, requests=self.tokens if self.single else shape.requests + 1)

    def batch(self, batch: Any) -> Any:
        """A batch as planned for it, or one for each micro-batch, with padding as requests."""
        if hasattr(batch, "query_lengths"):
            return whole(batch)
        return tuple(map(whole, batch))

    def program(self, program: Program) -> Program:
        """The program made for the lengths that do not change."""
        if not self.single:
            return program
        return program.with_fixed({"batch.query_lengths": (1,) * self.tokens})


def form_of(sizes: Sequence[int], lengths: Sequence[Sequence[int]], *, split: bool) -> Form | None:
    """The form for the new tokens of each replica's requests, None where no size has room for them.

    Micro-batches cut a step anywhere, so there lengths change.
    """
    most = max(sum(mine) for mine in lengths)
    room = [size for size in sizes if size >= max(most, 2 if split else 1)]
    if not room or not most:
        return None
    return Form(room[-1], not split and all(length == 1 for mine in lengths for length in mine))


@define(eq=False)
class Captures:
    """What a runner has captured, by key, in this order, and what has been held against the law."""

    members: dict[Any, Member] = field(factory=dict)
    checked: int = 0

    def add(self, key: Any, run: Any) -> None:
        """Take in an executable that has captured its program."""
        if key not in self.members:
            name = f"{key[0]}{len(self.members)}"
            self.members[key] = Member(name, run.program, pool="graphs", room=tuple(sorted(run.rooms.items())))

    def check(self) -> None:
        """Raise `LawError` unless all may be replayed, each behind each; pairs that have been checked are not again."""
        members = list(self.members.values())
        if len(members) > self.checked:
            check_session(session(members, known=self.checked))
        self.checked = len(members)


def session(members: Sequence[Member], *, known: int = 0) -> Session:
    """Members captured in this order, and replayed each behind each, but for pairs of the `known` first ones.

    Parameters and states of one name are one memory, in programs of one kind.
    """
    first = dict[str, int]()
    for member in members:
        for name, size in member.room:
            first.setdefault(name, size)
    shared: dict[tuple[str, str], list[str]] = {}
    for member in members:
        states, kind = member.program.states(), member.name.rstrip("0123456789")
        for put in member.program.inputs:
            if put.role == "parameter" or put.name in states:
                shared.setdefault((kind, put.name), []).append(f"{member.name}.{put.name}")
    return Session(
        tuple(members),
        (
            *(Reserve(name, size) for name, size in first.items()),
            *(Capture(member.name) for member in members),
            *every_order([turn(member, captured=True) for member in members], known=known),
        ),
        tuple(tuple(names) for names in shared.values() if len(names) > 1),
    )
