"""Small ops over integers in float64, exact and quick, that feel every operand: for random programs.

    out[i] = (salt + sum_k (k + 2) * operand_k[i]) * 31 mod 10007

NaN goes through.  Salts are unique within a step, so they also say which
stream a call is placed on.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from attrs import frozen
from hypothesis import strategies as st

from mla_fx.backends import Backend
from mla_fx.effects import Aval, Call, Launch, Op, Program, Step, Value, arg, bind

SIZE = 2
RANKS = 2


@frozen
class Toy(Op):
    salt: int

    def shape_rule(self, *operands: Aval) -> tuple[Aval, ...]:
        return tuple(operands[0] for _ in self.results)


@frozen
class One(Toy):
    operands: ClassVar = ("a",)


@frozen
class Two(Toy):
    operands: ClassVar = ("a", "b")


@frozen
class Fork(Toy):
    operands: ClassVar = ("a",)
    results: ClassVar = ("left", "right")


@frozen
class Scratch(Toy):
    operands: ClassVar = ("a",)
    uses: ClassVar = ("workspace",)


@frozen
class Update(Toy):
    operands: ClassVar = ("state", "a")
    results: ClassVar = ("state",)
    writes: ClassVar[Mapping[int, int]] = MappingProxyType({0: 0})


@frozen
class Exchange(Toy):
    operands: ClassVar = ("a",)
    communicates: ClassVar = "dcp"


def mix(*operands: torch.Tensor, salt: int) -> torch.Tensor:
    total = salt + sum((k + 2) * x for k, x in enumerate(operands))
    return torch.remainder(total * 31, 10007)


def mix_rule(*operands: torch.Tensor, salt: int) -> tuple[torch.Tensor, ...]:
    return (mix(*operands, salt=salt),)


def fork_rule(a: torch.Tensor, *, salt: int) -> tuple[torch.Tensor, ...]:
    return mix(a, salt=salt), mix(a, salt=salt + 1)


def update_rule(state: torch.Tensor, a: torch.Tensor, *, salt: int) -> tuple[torch.Tensor, ...]:
    return (state.copy_(mix(state, a, salt=salt)),)


def exchange_rule(ranks: Sequence[tuple[torch.Tensor]], *, salt: int) -> list[tuple[torch.Tensor]]:
    values = [a for (a,) in ranks]
    return [(mix(*values[r:], *values[:r], salt=salt),) for r in range(len(values))]


RULES: Mapping[type[Op], Any] = {
    One: mix_rule,
    Two: mix_rule,
    Scratch: mix_rule,
    Fork: fork_rule,
    Update: update_rule,
    Exchange: exchange_rule,
}


def backend(seed: int | None = None, ranks: int = RANKS) -> Backend:
    return Backend("toys", RULES, ranks=ranks, adversary=seed)


def run(program: Program, seed: int | None = None, ranks: int = RANKS) -> list[float]:
    """Outputs of all ranks, flat; `seed` None runs plainly."""
    executable = backend(seed, ranks).compile(program, unchecked=True)
    arguments = [
        [torch.full((SIZE,), float(100 * k + 7 * r + 1), dtype=torch.float64) for r in range(ranks)]
        for k in range(len(program.inputs))
    ]
    outputs = executable(*arguments)
    return [float(x) for entry in outputs for tensor in entry for x in tensor]


def same(left: list[float], right: list[float]) -> bool:
    return left == right  # NaN differs from itself, as it should here


def goes_wrong(program: Program, expected: list[float], seeds: range) -> bool:
    return any(not same(run(program, seed), expected) for seed in seeds)


@st.composite
def steps(draw: st.DrawFn, max_calls: int = 9) -> Step:
    """A random computation: every value ends up in an output, states are written in place."""
    inputs = {f"x{k}": arg(f"x{k}", (SIZE,), "fp64") for k in range(draw(st.integers(1, 3)))}
    values: list[Value] = list(inputs.values())
    states: list[Value] = []  # newest versions
    used: set[int] = set()
    for salt in range(1, 2 * draw(st.integers(1, max_calls)), 2):
        kind = draw(st.sampled_from([One, One, Two, Fork, Scratch, Scratch, Exchange, Update, Update]))
        if kind is Update and not states:
            # A state that the program makes, or one of the caller's.
            states.append(values.pop(draw(st.integers(0, len(values) - 1))) if len(values) > 1 else values[0])
            if len(values) == 1 and states[-1] is values[0]:
                states.pop()
                kind = One
        readable = [*values, *states]
        if kind is Update:
            which = draw(st.integers(0, len(states) - 1))
            operands = [states[which], draw(st.sampled_from(values))]
            results = bind(Update(salt), *operands)
            states[which] = results[0]
        else:
            operands = [draw(st.sampled_from(readable)) for _ in kind.operands]
            results = bind(kind(salt), *operands)
            values.extend(results)
        used.update(map(id, operands))
    ends = [v for v in values if id(v) not in used and v.call is not None] + [s for s in states if s.call]
    return Step("toys", inputs, tuple(dict.fromkeys(ends)))


@st.composite
def placements(draw: st.DrawFn, max_streams: int = 4) -> Any:
    """A random stream for every salt."""
    streams = ["main", "side", "comm", "aux"][: draw(st.integers(1, max_streams))]
    table = draw(st.lists(st.sampled_from(streams), min_size=24, max_size=24))

    def place(call: Call) -> str:
        return table[call.op.salt % len(table)]

    return place


def launches(program: Program) -> list[int]:
    return [k for k, effect in enumerate(program.effects) if isinstance(effect, Launch)]
