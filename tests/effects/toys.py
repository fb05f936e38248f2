"""Small ops over integers in float64, exact and quick, that feel every operand: for random programs.

    out[i] = (salt + sum_k (k + 2) * operand_k[i]) * 31 mod 10007

NaN goes through.  Salts are unique within a step, so they also say which
stream an equation is put on.  A collective adds what the ranks send, each
weighed by how far it is from the receiver, and feels the size of its group.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from attrs import evolve, frozen
from hypothesis import strategies as st

from mla_fx.backends import Backend, Collective, Executable, InProcess
from mla_fx.backends.adversary import Adversary
from mla_fx.backends.device import Run
from mla_fx.effects import (
    Aval,
    Equation,
    Group,
    Input,
    Launch,
    Op,
    Program,
    Record,
    Step,
    Value,
    Wait,
    bind,
    on_host,
    trace,
)

SIZE = 2
RANKS = 2
STREAMS = ("main", "side", "comm", "aux")
X = Aval((SIZE,), "fp64")
LENGTHS = Aval((2,), "int64")
DCP, TP = Group("dcp", RANKS), Group("tp", RANKS)
ALONE = Group("ep", RANKS, independent=True)


@frozen
class Toy(Op):
    salt: int

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        return tuple(Aval((axes["T"],), dtype) for _ in self.results)


@frozen
class One(Toy):
    operands: ClassVar = {"a": "T"}


@frozen
class Two(Toy):
    operands: ClassVar = {"a": "T", "b": "T"}


@frozen
class Fork(Toy):
    operands: ClassVar = {"a": "T"}
    results: ClassVar = ("left", "right")


@frozen
class Scratch(One):
    uses: ClassVar = ("workspace",)


@frozen
class Room(One):
    """Another workspace."""

    uses: ClassVar = ("room",)


@frozen
class Both(One):
    """Two workspaces at once."""

    uses: ClassVar = ("workspace", "room")


@frozen
class Update(Toy):
    operands: ClassVar = {"state": "T", "a": "T"}
    results: ClassVar = ("state",)
    writes: ClassVar = {"state": "state"}


@frozen
class Peek(Toy):
    """A view of what it takes, and something that it makes of it."""

    operands: ClassVar = {"a": "T"}
    results: ClassVar = ("view", "made")
    views: ClassVar = {"view": "a"}


@frozen
class Lengths(Toy):
    """Feels integers on the host, and uses a workspace, as attention does."""

    operands: ClassVar = {"a": "T", "lengths": "B host"}
    uses: ClassVar = ("workspace",)


@frozen
class Asks(One):
    """Reads on the host what it then goes by."""

    waits: ClassVar = True


@frozen
class Exchange(Toy):
    group: Group = DCP
    operands: ClassVar = {"a": "T"}
    communicates: ClassVar = "all_gather"


@frozen
class Swap(Exchange):
    """A collective that needs a workspace too: its name is that of a group, and they are kept apart."""

    uses: ClassVar = ("dcp",)


def mix(*operands: torch.Tensor, salt: int) -> torch.Tensor:
    total = salt + sum((k + 2) * x for k, x in enumerate(operands))
    return torch.remainder(total * 31, 10007)


def mix_rule(*operands: torch.Tensor, run: Run, salt: int) -> tuple[torch.Tensor, ...]:
    return (mix(*operands, salt=salt),)


def fork_rule(a: torch.Tensor, *, run: Run, salt: int) -> tuple[torch.Tensor, ...]:
    return mix(a, salt=salt), mix(a, salt=salt + 1)


def peek_rule(a: torch.Tensor, *, run: Run, salt: int) -> tuple[torch.Tensor, ...]:
    return a[:], mix(a, salt=salt)


def update_rule(state: torch.Tensor, a: torch.Tensor, *, run: Run, salt: int) -> tuple[torch.Tensor, ...]:
    return (state.copy_(mix(state, a, salt=salt)),)


def lengths_rule(a: torch.Tensor, lengths: tuple[int, ...], *, run: Run, salt: int) -> tuple[torch.Tensor, ...]:
    return (mix(a, salt=salt + sum((k + 1) * one for k, one in enumerate(lengths))),)


def send(a: torch.Tensor, *, run: Run, salt: int, group: Group) -> torch.Tensor:
    return a.clone()


def receive(moved: torch.Tensor, a: torch.Tensor, *, run: Run, salt: int, group: Group) -> tuple[torch.Tensor, ...]:
    return (mix(*moved.roll(-run.rank, 0), salt=salt),)


RULES: Mapping[type[Op], Any] = {
    **dict.fromkeys((One, Two, Scratch, Room, Both, Asks), mix_rule),
    Lengths: lengths_rule,
    Fork: fork_rule,
    Update: update_rule,
    Peek: peek_rule,
    **dict.fromkeys((Exchange, Swap), Collective(send, receive)),
}


def backend(seed: int | None = None, ranks: int = RANKS) -> Backend:
    return Backend("toys", RULES, InProcess(ranks), adversary=seed)


def run(program: Program, seed: int | None = None, ranks: int = RANKS) -> list[float]:
    """Outputs of all ranks, flat; `seed` None runs plainly."""
    return next(runs(program, [seed], ranks))


def runs(program: Program, seeds: Iterable[int | None], ranks: int = RANKS) -> Iterator[list[float]]:
    """Outputs under one seed after the other, of a program that is compiled once."""
    made: dict[bool, Executable] = {}
    for seed in seeds:
        hostile = seed is not None
        if hostile not in made:
            made[hostile] = backend(seed, ranks).compile(program, unchecked=True)
        if isinstance(made[hostile].body, Adversary):
            made[hostile].body.seed = seed
        arguments = [
            [torch.full((SIZE,), float(100 * k + 7 * r + 1), dtype=torch.float64) for r in range(ranks)]
            for k in range(len(program.inputs))
        ]
        yield [float(x) for entry in made[hostile](*arguments) for tensor in entry for x in tensor]


def same(left: list[float], right: list[float]) -> bool:
    return left == right  # NaN differs from itself, as it should here


def right(program: Program, expected: list[float], seeds: Iterable[int | None]) -> None:
    """Every seed gives what is expected."""
    seeds = list(seeds)
    for seed, found in zip(seeds, runs(program, seeds), strict=True):
        assert same(found, expected), f"wrong under seed {seed}\n{program}"


def goes_wrong(program: Program, expected: list[float], seeds: Iterable[int]) -> bool:
    return any(not same(found, expected) for found in runs(program, seeds))


def step_of(function: Callable[..., Any], *names: str) -> Step:
    """The step of a function of values [SIZE], named as its arguments are."""
    code = function.__code__
    return trace(function, "toy", **dict.fromkeys(names or code.co_varnames[: code.co_argcount], X))


def without_idle_records(program: Program) -> Program:
    """Without the records that nobody waits for, as they are left when a wait goes."""
    waited = {effect.event for effect in program.effects if isinstance(effect, Wait)}
    kept = (effect for effect in program.effects if not isinstance(effect, Record) or effect.event in waited)
    return evolve(program, effects=tuple(kept))


def put(name: str) -> Input:
    return Input(name, X)


#: What random steps are made of; the more often a kind stands here, the more often it is drawn.
KINDS: tuple[type[Toy], ...] = (
    *(One, One, Two, Two, Fork, Scratch, Scratch, Room, Room, Both),
    *(Exchange, Swap, Update, Update),
)
#: What collectives run over: two groups that are in one order, or one of them and one that is independent.
GROUPS = ((DCP, TP), (DCP, TP), (DCP, ALONE))


#: Fewer reasons for an order, so that values are still in use on several streams when their own goes on: keeps.
CALM: tuple[type[Toy], ...] = (One, One, Two, Two, Fork, Exchange)
#: Memory under several names, and written through some of them.
VIEWS: tuple[type[Toy], ...] = (One, One, Two, Peek, Peek, Peek, Update, Exchange)

#: What steps that are captured are made of: launches that are updated, among others.
CAPTURED: tuple[type[Toy], ...] = (One, Two, Fork, Lengths, Lengths, Peek, Exchange, Update, Update)


@st.composite
def steps(draw: st.DrawFn, max_calls: int = 9, kinds: tuple[type[Toy], ...] = ()) -> Step:
    """A random computation: every value ends up in an output, states are written in place, through views too."""
    kinds = kinds or draw(st.sampled_from([KINDS, CALM, VIEWS]))
    groups = draw(st.sampled_from(GROUPS))
    count, calls = draw(st.integers(1, 3)), draw(st.integers(1, max_calls))

    def compute(**inputs: Value) -> tuple[Value, ...]:
        values = [value for name, value in inputs.items() if name != "lengths"]
        states: list[Value] = []  # newest versions
        memory = {value: value.name for value in values}
        made: list[Value] = []
        used: set[Value] = set()
        for salt in range(1, 2 * calls, 2):
            kind = draw(st.sampled_from(kinds))
            if kind is Update:
                # A state that the program makes, or one of the caller's; or a state that is one already.
                state = draw(st.sampled_from(states or values))
                others = [value for value in values if memory[value] != memory[state]]
                kind = kind if others else One
            if kind is Update:
                operands = [state, draw(st.sampled_from(others))]
                results = bind(Update(salt), *operands)
                memory[results[0]] = memory[state]
                values, states = others, [one for one in states if memory[one] != memory[state]] + [results[0]]
            else:
                group = {"group": draw(st.sampled_from(groups))} if kind.communicates else {}
                operands = [draw(st.sampled_from([*values, *states])) for name in kind.operands if name != "lengths"]
                operands += [inputs["lengths"]] if kind is Lengths else []
                results = bind(kind(salt, **group), *operands)
                memory.update((value, f"{salt}.{k}") for k, value in enumerate(results))
                if kind is Peek:
                    memory[results[0]] = memory[operands[0]]
                values.extend(results)
            made.extend(results)
            used.update(operands)
        ends = [v for v in values if v not in used and v in made] + [s for s in states if s in made]
        return tuple(dict.fromkeys(ends))

    on_the_host = {"lengths": on_host(LENGTHS)} if Lengths in kinds else {}
    return trace(compute, "toys", **{f"x{k}": X for k in range(count)}, **on_the_host)


def placed(table: Mapping[int, str]) -> Callable[[Equation], str]:
    """A stream for every salt; main where the table has none."""

    def by_salt(equation: Equation) -> str:
        op = equation.op
        assert isinstance(op, Toy)
        return table.get(op.salt, "main")

    return by_salt


@st.composite
def orchestrations(draw: st.DrawFn, max_streams: int = 4) -> Callable[[Equation], str]:
    """A random stream for every salt."""
    streams = STREAMS[: draw(st.integers(1, max_streams))]
    return placed(dict(enumerate(draw(st.lists(st.sampled_from(streams), min_size=24, max_size=24)))))


def launches(program: Program) -> list[int]:
    return [k for k, effect in enumerate(program.effects) if isinstance(effect, Launch)]
