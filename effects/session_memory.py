"""What the law of a session knows of memory: what a program touches, who has which memory since when."""

from collections import defaultdict
from collections.abc import Mapping

from attrs import define, field, frozen

from mla_fx.effects.session import Action, Member

#: Memory with a name: ("state", name), ("workspace", name), ("input", buffer), ("output", "member.output").
Place = tuple[str, str]


@frozen(eq=False)
class Facts:
    """What a program touches, as a session sees it."""

    reads: frozenset[Place]  # states
    writes: frozenset[Place]  # states and workspaces
    lanes: frozenset[str]  # of its collectives: an independent group, or "" for all others
    home: Mapping[str, str]  # memory that the program allocates -> its stream
    outputs: Mapping[str, Place | str]  # output -> where it lies: memory with a name, or that of a value
    streams: frozenset[str]  # on which it takes memory: operators take some for themselves, too
    workspaces: tuple[str, ...]
    static: str  # the buffer of its static inputs, "" where it takes none
    inputs: frozenset[str]  # static ones, those too that nothing takes
    shown: frozenset[str]  # those that outputs lie in
    updatable: tuple[str, ...]


@frozen(eq=False)
class Life:
    """The memory of one capture or one run."""

    member: Member
    facts: Facts
    taken: int  # number of the action that takes it
    captured: bool

    def shares(self, other: "Life") -> bool:
        """Whether both take from one pool."""
        return bool(self.member.pool) and self.member.pool == other.member.pool

    def may_be(self, other: "Life") -> bool:
        """Whether some memory of both may be one: the later one takes what the earlier one has let go of."""
        return self is other or (self.shares(other) and bool(self.facts.streams & other.facts.streams))

    def whose(self, other: "Life") -> int:
        """The rule that keeps them apart: of captures over one pool, or of captures and whoever else is there."""
        return 8 if self.captured and other.captured else 7


@frozen(eq=False)
class Use:
    """An action, with the tick of its stream, what its stream had seen before it, and what it touches."""

    action: Action
    number: int
    stream: str
    tick: int
    seen: Mapping[str, int]
    reads: frozenset[Place] = frozenset()
    writes: frozenset[Place] = frozenset()
    ends: frozenset[Place] = frozenset()  # what is no more: whoever used it must be through
    lanes: frozenset[str] = frozenset()
    life: Life | None = None  # all of which it writes

    def before(self, other: "Use") -> bool:
        """Whether it runs before the other one in every execution."""
        return other.seen.get(self.stream, 0) >= self.tick

    def __str__(self) -> str:
        return f"{self.action} [{self.number}]"


@define(eq=False)
class Content:
    """What an output holds: who made it, where it lies, and who may have written there since."""

    made: Use
    life: Life
    where: Place | str
    spoiled: Use | None = None

    def may_be_written(self, use: Use) -> bool:
        """Whether an action of another life may write where the output lies."""
        if isinstance(self.where, tuple):
            return self.where in use.writes
        if use.life is None or use.life is self.life or not self.life.shares(use.life):
            return False
        return use.life.taken < self.life.taken and self.life.facts.home[self.where] in use.life.facts.streams


@define(eq=False)
class Captured:
    """A capture: its memory, the updates for its next replay, and its replays so far, without those before others."""

    use: Use
    life: Life
    pending: dict[str, list[Use]] = field(factory=lambda: defaultdict(list))  # launch -> its updates
    replays: list[Use] = field(factory=list)


@frozen(eq=False)
class Buffer:
    """A workspace or a staging buffer: its size, and what made it grow last."""

    size: int = 0
    grown: Use | None = None


def see(clock: dict[str, int], other: Mapping[str, int]) -> None:
    """A clock has seen what another one has."""
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


def facts_of(member: Member, state: Mapping[str, str]) -> Facts:
    """The facts of a member; `state` says which memory an input "member.input" is, where it is shared."""
    program, name = member.program, member.name
    root, home = program.memory(), program.home()
    inputs = {put.name: put for put in program.inputs}
    written = {root[launch.operands[at]] for launch in program.launches for at in launch.op.written()} & {*inputs}
    used = {root[one] for launch in program.launches for one in launch.operands} | {
        root.get(o) for o in program.outputs
    }
    states = {one for one in inputs if one in written or f"{name}.{one}" in state or inputs[one].role == "state"}
    static = {n for n, put in inputs.items() if put.role == "data" and put.place != "host" and n not in states}
    changing = {put.name for put in program.inputs if put.place == "host" and put.fixed is None}
    buffer = member.staging or f"{name}." if static & used else ""

    def place(put: str) -> Place:
        return ("input", buffer) if put in static else ("state", state.get(f"{name}.{put}", f"{name}.{put}"))

    workspaces = dict.fromkeys(one for launch in program.launches for one in launch.op.uses)
    groups = [launch.op.group_of() for launch in program.launches if launch.op.communicates]
    own = {value: home[value] for value in home if root[value] == value}
    outputs = {one: place(root[one]) if root[one] in inputs else root[one] for one in program.outputs if one in root}
    return Facts(
        reads=frozenset(map(place, (states | static) & used)),
        writes=frozenset([*map(place, written), *(("workspace", one) for one in workspaces)]),
        lanes=frozenset(group.name if group is not None and group.independent else "" for group in groups),
        home=own,
        outputs=outputs,
        streams=frozenset(launch.stream for launch in program.launches),
        workspaces=tuple(workspaces),
        static=buffer,
        inputs=frozenset(static),
        shown=frozenset(static & {root.get(one) for one in program.outputs}),
        updatable=tuple(one.results[0] for one in program.launches if one.results and changing & {*one.operands}),
    )
