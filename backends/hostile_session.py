"""The hostile machine plays sessions, on the host and with real values, by a seed.

What a program may meet is said in `mla_fx.backends.adversary`.  In a session

    A replay runs over the blocks that its capture was laid out over, a run over its own.
    What is let go of in no pool is somebody else's, who writes it at any time; so is a static input that has been
    dropped, what a buffer was before it grew, and what a released capture had for itself.
    A replay or a run begins when its stream comes to it, on queues of its own, and its stream goes on when its main
    queue is through.
    A launch that is updated waits for its update and takes what is there when it ends; while another update is under
    way, that is nothing.  A launch that nothing updates, one that waited for the host as it was captured, and one
    whose workspace was not there, gives NaN.
    A fill is torn until it is done.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from mla_fx.backends.adversary import Adversary
from mla_fx.backends.hostile import Hostile, Mark, Move, nothing, poison
from mla_fx.backends.hostile_memory import Laid, Life, Memory, Room, Slot
from mla_fx.effects import (
    MAIN,
    Capture,
    Drop,
    Fill,
    InputError,
    Launch,
    Member,
    Read,
    Record,
    Release,
    Replay,
    Reserve,
    Run,
    Session,
    Update,
    Wait,
    check_session,
)
from mla_fx.effects.session import Action, Taken

if TYPE_CHECKING:
    from mla_fx.backends.backend import Backend

#: What the caller gives: for an input of a member, by name, in which of its turns, on which rank.
Given = Callable[[str, str, int, int], Any]
States = Mapping[str, Sequence[torch.Tensor]]
_HOST: Final = "<host>"
_SOMEBODY: Final = "<somebody>"
#: How often somebody writes what is theirs for each thing that the host does.
_WRITES: Final = 3
#: How many moves an update may come late.
_LATE: Final = (0, 0, 6)


def play(
    session: Session, backend: "Backend", given: Given, states: States, *, seed: int, unchecked: bool = False
) -> tuple[list[list[torch.Tensor]], dict[str, list[torch.Tensor]]]:
    """Play a session: what each `Read` reads, for all ranks, and the states at the end.

    `given(member, input, turn, rank)` is a tensor, or a tuple of integers for an input on the host; the turns of a
    member are its replays and runs so far, and parameters are those of turn 0.  `states` has the memory of states for
    all ranks, by the first name in `Session.shared`, or "member.input"; it is not written.  Raises `LawError` unless
    `unchecked`, to see what a fault does, and `InputError` where a state is not there.  A fault may hang: `HangError`.
    """
    if not unchecked:
        check_session(session)
    one = {name: names[0] for names in session.shared for name in names}
    for member in session.members:
        roles = {put.name for put in member.program.inputs if put.role == "state"}
        for put in (*member.program.states(), *roles):
            name = f"{member.name}.{put}"
            if one.get(name, name) not in states:
                raise InputError(f"states: must have {one.get(name, name)}: got {', '.join(states) or 'none'}")
    programs = {member.name: member.program for member in session.members}
    machines = {name: Adversary(one, backend, None, seed=seed, legal=False) for name, one in programs.items()}
    run = _Play(session, machines, given, states, random.Random(seed), backend.ranks)
    run.drive(8 * backend.ranks * (len(session.actions) + run.launches()))
    if not unchecked and run.error is not None:
        raise run.error
    reads = [number for number, action in enumerate(session.actions) if isinstance(action, Read)]
    ends = {name: [memory.states[name] for memory in run.memory] for name in states}
    return [[memory.read[number] for memory in run.memory] for number in reads], ends


class _Play(Hostile):
    """One execution."""

    def __init__(
        self,
        session: Session,
        machines: Mapping[str, Adversary],
        given: Given,
        states: States,
        draw: random.Random,
        ranks: int,
    ) -> None:
        super().__init__(ranks, draw)
        self.session, self.machines, self.given = session, machines, given
        self.members = {one.name: one for one in session.members}
        self.memory = [
            Memory(rank, session, machines, {name: each[rank].clone() for name, each in states.items()}, draw)
            for rank in range(ranks)
        ]
        for rank in range(ranks):
            actions = enumerate(session.actions)
            self.queues[rank, _HOST] = deque(Move(partial(self.issue, rank, *one)) for one in actions)

    def launches(self) -> int:
        """How many launches the session runs."""
        runs = [action.member for action in self.session.actions if isinstance(action, Replay | Run)]
        return sum(len(self.machines[name].program.launches) for name in runs)

    def on(self, rank: int, stream: str, act: Callable[[], None], ready: Callable[[], bool] | None = None) -> None:
        """Give a stream of the session something to do."""
        self.queues.setdefault((rank, stream), deque()).append(Move(act, ready))

    # --- the host ----------------------------------------------------------

    def issue(self, rank: int, number: int, action: Action) -> None:
        """The host of a rank does the next thing."""
        memory = self.memory[rank]
        match action:
            case Reserve():
                self.grow(rank, ((action.buffer, action.size),))
            case Capture():
                self.capture(rank, self.members[action.member])
            case Fill():
                self.fill(rank, action)
            case Update():
                self.update(rank, action)
            case Replay():
                memory.turns[action.member] += 1
                self.execute(rank, number, memory.lives[action.member], action.stream, nothing)
            case Run():
                self.run(rank, number, action)
            case Read():
                output = memory.lives[action.member].outputs[action.output]
                self.on(rank, action.stream, lambda: memory.read.update({number: output.clone()}))
            case Drop():
                self.drop(rank, *action.value.split(".", 1))
            case Release():
                self.release(rank, memory.lives[action.member])
            case Record():
                memory.events[action.event] = mark = Mark()
                self.on(rank, action.stream, mark.passes)
            case Wait():
                event = memory.events.get(action.event, Mark(passed=True))
                self.on(rank, action.stream, nothing, partial(_passed, event))
        for _ in range(_WRITES if memory.gives else 0):
            self.on(rank, _SOMEBODY, partial(self.somebody, rank))

    def somebody(self, rank: int) -> None:
        """Whoever has what nobody here holds any more writes it."""
        for thing in self.memory[rank].somebodys:
            if isinstance(thing, Room):
                self.scratch[rank][thing] = object()
                thing = thing.memory
            if thing is not None:
                poison(thing)

    def gives_back(self, rank: int, *things: Any) -> None:
        """Memory is somebody else's, once main gets here."""
        memory = self.memory[rank]
        memory.gives |= bool(things)
        self.on(rank, MAIN, partial(memory.somebodys.extend, things))

    def grow(self, rank: int, asked: Sequence[tuple[str, int]]) -> frozenset[str]:
        """Buffers grow: they are others, and the old ones are let go of; returns which."""
        before = {name: self.memory[rank].room(name, size) for name, size in asked}
        self.gives_back(rank, *(room for room in before.values() if room is not None))
        return frozenset(name for name, room in before.items() if room is not None)

    def capture(self, rank: int, member: Member) -> None:
        memory = self.memory[rank]
        missing = self.grow(rank, member.room)
        room = memory.rooms[member.staging] if member.staging else Room()
        life = Life(member, {**memory.inputs(member, room), **self.parameters(rank, member)}, missing=missing)
        updated = {*member.program.updatable()}
        life.slots = {k: Slot() for k, launch in enumerate(member.program.launches) if launch in updated}
        memory.lives[member.name] = life
        self.gives_back(rank, *memory.lay_out(life, _fixed(member)))

    def parameters(self, rank: int, member: Member) -> dict[str, torch.Tensor]:
        names = [put.name for put in member.program.inputs if put.role == "parameter"]
        return {name: self.given(member.name, name, 0, rank) for name in names}

    def sources(self, rank: int, member: Member, takes: Sequence[Taken]) -> dict[str, torch.Tensor]:
        """Where the data of the next turn of a program lies: what the caller gives, and outputs."""
        memory = self.memory[rank]
        turn, taken = memory.turns[member.name], dict(takes)
        found = {name: self.given(member.name, name, turn, rank) for name in memory.data(member) if name not in taken}
        for put, source in takes:
            owner, output = source.split(".", 1)
            found[put] = memory.lives[owner].outputs[output]
        return found

    def fill(self, rank: int, fill: Fill) -> None:
        """One copy, which others may see before it is done."""
        life = self.memory[rank].lives[fill.member]
        values = self.sources(rank, life.member, fill.takes)

        def begin() -> None:
            for name in values:
                poison(life.inputs[name])

        def end() -> None:
            for name, value in values.items():
                life.inputs[name].copy_(value)

        self.on(rank, fill.stream, begin)
        self.on(rank, fill.stream, end)

    def update(self, rank: int, update: Update) -> None:
        life = self.memory[rank].lives[update.member]
        launches = enumerate(life.member.program.launches)
        number, launch = next((k, one) for k, one in launches if update.launch in one.results[:1])
        slot, turn = life.slots[number], self.memory[rank].turns[update.member]
        names = {launch.operands[position] for position in launch.op.on_host()} - {*_fixed(life.member)}
        slot.issued += 1
        values = {name: self.given(update.member, name, turn, rank) for name in names}
        for _ in range(self.draw.choice(_LATE)):
            self.on(rank, update.stream, nothing)
        self.on(rank, update.stream, partial(slot.begins, values))
        self.on(rank, update.stream, slot.ends)

    def run(self, rank: int, number: int, run: Run) -> None:
        """An eager run over memory that is laid out for it; then the outputs of the run before are let go of."""
        memory, member = self.memory[rank], self.members[run.member]
        self.grow(rank, member.room)
        values, taken = self.sources(rank, member, run.takes), dict(run.takes)
        life = Life(member, {**memory.inputs(member, Room()), **self.parameters(rank, member)})
        life.inputs.update({name: values.pop(name) for name in taken})
        turn, on_host = memory.turns[run.member], _fixed(member)
        names = [put.name for put in member.program.inputs if put.place == "host" and put.name not in on_host]
        memory.lay_out(life, {**on_host, **{name: self.given(run.member, name, turn, rank) for name in names}})
        before, memory.lives[run.member] = memory.lives.get(run.member), life
        memory.turns[run.member] += 1

        def arrive() -> None:
            for name, value in values.items():
                life.inputs[name].copy_(value)

        self.execute(rank, number, life, MAIN, arrive)
        if before is not None:
            self.gives_back(rank, *memory.let_go(before))

    def drop(self, rank: int, name: str, value: str) -> None:
        memory = self.memory[rank]
        life = memory.lives[name]
        if value in life.outputs:
            self.gives_back(rank, *memory.let_go(life, self.machines[name].root[value]))
        else:
            self.gives_back(rank, *(life.inputs[put] for put in memory.data(life.member)))

    def release(self, rank: int, life: Life) -> None:
        """What a capture had for itself is NaN from here on, and then somebody's."""
        memory = self.memory[rank]
        own = [] if life.member.staging else [life.inputs[put] for put in memory.data(life.member)]
        for tensor in (*life.blocks.values(), *own):
            self.on(rank, MAIN, partial(poison, tensor))
        self.gives_back(rank, *memory.let_go(life), *own)

    # --- replays and runs --------------------------------------------------------

    def execute(self, rank: int, number: int, life: Life, stream: str, arrive: Callable[[], None]) -> None:
        """Queues of its own for one run of a program over memory that is laid out."""
        names = {name: f"{name} of {number}" for name in life.member.program.streams}
        begun, done, events = Mark(), Mark(), dict[str, Mark]()
        self.on(rank, stream, begun.passes)
        for name in names.values():
            self.on(rank, name, arrive if name == names[MAIN] else nothing, partial(_passed, begun))
        laid = enumerate(life.launches)
        for effect in life.member.program.effects:
            match effect:
                case Launch():
                    self.launch(rank, names[effect.stream], (number, *next(laid)), life, effect)
                case Record():
                    events[effect.event] = mark = Mark()
                    self.on(rank, names[effect.stream], mark.passes)
                case Wait():
                    event = events.get(effect.event, Mark(passed=True))
                    self.on(rank, names[effect.stream], nothing, partial(_passed, event))
                case _:
                    pass  # what is staged comes with the other inputs, and memory has been laid out
        self.on(rank, names[MAIN], done.passes)
        self.on(rank, stream, partial(self.through, rank, [*names.values()]), partial(_passed, done))

    def through(self, rank: int, names: Sequence[str]) -> None:
        """A replay or run is through; queues of its that have not joined go on."""
        for name in names:
            if not self.queues[rank, name]:
                del self.queues[rank, name]

    def launch(self, rank: int, queue: str, of: tuple[int, int, Laid], life: Life, launch: Launch) -> None:
        number, index, laid = of
        machine, slot = self.machines[life.member.name], life.slots.get(index)
        memory = (laid.operands, laid.results, laid.ruined, laid.states, laid.rooms)
        task = machine.task(launch, rank, index, (number, index), *memory)
        captured = isinstance(self.session.actions[number], Replay)
        task.spoiled = captured and (launch.op.waits or bool(life.missing & {*launch.op.uses}))
        if slot is not None and slot.taken < slot.issued:
            slot.taken += 1
            self.on(rank, queue, slot.use, lambda: slot.done > slot.used)
        elif slot is not None:
            task.spoiled = True
        version: list[int] = []

        def begin() -> None:
            version.append(slot.version if slot else 0)
            self.begin(task)

        def end() -> None:
            if slot is not None:
                task.spoiled |= bool(slot.under_way) or slot.version != version[0]
                task.operands = tuple(slot.operand(x, machine.avals) for x in laid.operands)
            self.end(task)

        self.on(rank, queue, begin)
        self.on(rank, queue, end, partial(self.met, task) if launch.op.communicates else None)


def _fixed(member: Member) -> dict[str, Any]:
    """Inputs on the host that are the same in every turn."""
    return {put.name: put.fixed for put in member.program.inputs if put.fixed is not None}


def _passed(mark: Mark) -> bool:
    return mark.passed
