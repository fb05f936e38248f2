"""Memory of one rank in a session that is played: pools, buffers, and where programs lie in them.

A capture, or a run, is laid out as an allocator would: every value gets a block
of its pool on its stream, most often one that is free there; a block fits any
value.  What a program drops is free for what it launches next on that stream,
and with it what its operators take for themselves: all that is free.  At the
end all is free but the outputs, what is kept too.
"""

import random
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from attrs import define, field, frozen

from mla_fx.backends.adversary import Adversary
from mla_fx.backends.hostile import Mark
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, Drop, Keep, Launch, Member, Session

#: Bytes that a static input begins at a multiple of.
_ALIGNED = 8


@define(eq=False)
class Room:
    """A buffer as it is until it grows: a workspace, or memory for static inputs."""

    size: int = 0
    memory: torch.Tensor | None = None


@define(eq=False)
class Slot:
    """The operands on the host of one launch of a graph."""

    values: dict[str, Any] = field(factory=dict)
    issued: int = 0  # updates that the host has issued
    taken: int = 0  # replays that one of these is for
    done: int = 0
    used: int = 0
    under_way: int = 0
    version: int = 0

    def operand(self, given: Any, avals: Mapping[str, Aval]) -> Any:
        """What an operand is now: `given`, or where that is a name, what the last update has set."""
        if not isinstance(given, str):
            return given
        return self.values.get(given, (0,) * avals[given].shape[0])

    def begins(self, values: dict[str, Any]) -> None:
        """An update is under way."""
        self.under_way += 1
        self.version += 1
        self.values = values

    def ends(self) -> None:
        """An update is done."""
        self.under_way -= 1
        self.done += 1

    def use(self) -> None:
        """A replay goes on with an update."""
        self.used += 1


@frozen(eq=False)
class Laid:
    """A launch as it is laid out."""

    operands: tuple[Any, ...]  # a name for what is set by updates
    results: tuple[torch.Tensor, ...]
    ruined: tuple[torch.Tensor, ...]
    states: tuple[torch.Tensor, ...]
    rooms: tuple[Any, ...]


@define(eq=False)
class Life:
    """One capture or run: where everything lies."""

    member: Member
    inputs: dict[str, torch.Tensor]
    launches: list[Laid] = field(factory=list)
    blocks: dict[str, torch.Tensor] = field(factory=dict)  # what has memory of its own -> its block
    outputs: dict[str, torch.Tensor] = field(factory=dict)
    slots: dict[int, Slot] = field(factory=dict)  # launch -> its operands on the host
    missing: frozenset[str] = frozenset()  # buffers that were too small when the capture began


class Memory:
    """The memory of one rank."""

    def __init__(
        self,
        rank: int,
        session: Session,
        machines: Mapping[str, Adversary],
        states: dict[str, torch.Tensor],
        draw: random.Random,
    ) -> None:
        self.rank, self.machines, self.states, self.draw = rank, machines, states, draw
        self.one = {name: names[0] for names in session.shared for name in names}
        sizes = [aval.bytes_ for machine in machines.values() for aval in machine.avals.values()]
        self.size = -(-max(sizes, default=0) // _ALIGNED) * _ALIGNED  # of a block
        self.most = max((len(member.program.inputs) for member in session.members), default=0)
        self.free: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)  # by pool and stream
        self.rooms: dict[str, Room] = defaultdict(Room)
        self.lives: dict[str, Life] = {}
        self.turns: dict[str, int] = defaultdict(int)  # replays and runs that the host has issued
        self.events: dict[str, Mark] = {}
        self.somebodys: list[Any] = []  # tensors and rooms
        self.gives = False  # whether there is or will be any
        self.read: dict[int, torch.Tensor] = {}  # number of the action -> what it read

    def block(self, times: int = 1) -> torch.Tensor:
        """Memory for any value, or for so many."""
        return torch.full((self.size * times,), 255, dtype=torch.uint8)

    def state(self, member: Member, put: str) -> str | None:
        """The memory of states that an input is."""
        name = self.one.get(f"{member.name}.{put}", f"{member.name}.{put}")
        return name if name in self.states else None

    def data(self, member: Member) -> list[str]:
        """The inputs that are filled, or given to a run."""
        inputs = (put for put in member.program.inputs if put.role == "data" and put.place != "host")
        return [put.name for put in inputs if self.state(member, put.name) is None]

    def room(self, buffer: str, size: int) -> Room | None:
        """Make a buffer as large; returns the one that was there, where that is another one."""
        before = self.rooms[buffer]
        if size <= before.size:
            return None
        self.rooms[buffer] = Room(size)
        return before

    def inputs(self, member: Member, room: Room) -> dict[str, torch.Tensor]:
        """Where inputs lie: states where they are, the others in a buffer."""
        if room.memory is None:
            room.memory = self.block(self.most)
        found, at = {}, 0
        for put in member.program.inputs:
            state = self.state(member, put.name)
            if state is not None:
                found[put.name] = self.states[state]
            elif put.place != "host":
                found[put.name] = as_value(room.memory[at:], put.aval)
                at += -(-put.aval.bytes_ // _ALIGNED) * _ALIGNED
        return found

    def lay_out(self, life: Life, on_host: Mapping[str, Any]) -> list[Any]:
        """Give every value its memory; returns what is free at the end, in no pool, and what stands for scratch."""
        member, machine = life.member, self.machines[life.member.name]
        free: dict[tuple[str, str], list[torch.Tensor]] = self.free if member.pool else defaultdict(list)
        scratch = {name: (member.pool, name) if member.pool else Room() for name in member.program.streams}
        lies: dict[str, Any] = {**life.inputs, **on_host}  # value -> its memory
        kept, later = set(), []
        for effect in member.program.effects:
            match effect:
                case Launch():
                    self.lay(life, effect, lies, free[member.pool, effect.stream], scratch[effect.stream])
                case Keep():
                    kept.add(machine.root[effect.value])
                case Drop():
                    root = machine.root[effect.value]
                    if root in kept:
                        later.append(root)
                    elif root in life.blocks:
                        free[member.pool, machine.home[root]].append(life.blocks.pop(root))
        life.outputs = {name: lies[name] for name in member.program.outputs if name in lies}
        held = {machine.root[name] for name in member.program.outputs}
        for root in dict.fromkeys([*later, *life.blocks]):
            if root in life.blocks and root not in held:
                free[member.pool, machine.home[root]].append(life.blocks.pop(root))
        return [] if member.pool else [*(block for blocks in free.values() for block in blocks), *scratch.values()]

    def lay(self, life: Life, launch: Launch, lies: dict[str, Any], free: list[torch.Tensor], scratch: Any) -> None:
        """Memory of one launch; `free` is what is free on its stream."""
        machine = self.machines[life.member.name]
        operands = tuple(lies.get(name, name) for name in launch.operands)
        for name in launch.results:
            root = machine.root[name]
            if root != name:
                lies[name] = machine.view(name, self.rank, lies[root])
                continue
            take = free and self.draw.random() < 0.8
            life.blocks[name] = free.pop(self.draw.randrange(len(free))) if take else self.block()
            lies[name] = as_value(life.blocks[name], machine.avals[name])
        if not free:
            free.append(self.block())
        states = tuple(lies[machine.root[launch.operands[at]]] for at in launch.op.written())
        rooms = (*(self.rooms[name] for name in launch.op.uses), scratch)
        life.launches.append(Laid(operands, tuple(lies[name] for name in launch.results), tuple(free), states, rooms))

    def let_go(self, life: Life, *values: str) -> list[torch.Tensor]:
        """Blocks are their pool's again: of these values, or all that there are; returns those that were in none."""
        found: list[torch.Tensor] = []
        home = self.machines[life.member.name].home
        for name in values or [*life.blocks]:
            block = life.blocks.pop(name, None)
            if block is not None:
                (self.free[life.member.pool, home[name]] if life.member.pool else found).append(block)
        return found


def as_value(memory: torch.Tensor, aval: Aval) -> torch.Tensor:
    """The front of some bytes, as a value."""
    return memory[: aval.bytes_].view(DTYPES[aval.dtype]).view(aval.shape)
