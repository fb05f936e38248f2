"""Orchestrations: which stream each equation of a step runs on, and in which order they are issued.

What is computed is the step's.  An orchestration may say what it wants of a step: passes that `schedule` applies to it
first, and micro-batches, which what makes the step splits it into.
"""

from collections.abc import Callable

from attrs import field, frozen

from mla_fx.effects.step import Equation, Step


def _same(step: Step) -> Step:
    return step


def _main(equation: Equation) -> str:
    return "main"


@frozen
class Orchestration:
    """Streams and order, as one value.

    `stream` gives an equation the name of its stream; "main" is the one that inputs are ready on and outputs are
    read on.  `streams` are those that it must make use of: a schedule that leaves one empty is refused, since then a
    name or a scope is not what the orchestration takes it for.  `order` gives the step with its equations in the
    order in which to issue them, as far as operands, states, workspaces and collectives allow; it may do no more
    than permute.

    `passes` are applied to a step before it is scheduled, one after the other, as one that puts prefetches in.
    `split` names the scope that the step should run in two micro-batches, as "attention" or "layers"; nothing here
    splits, but what makes a step can be asked to (`mla_fx.StepShape.split`).
    """

    name: str
    stream: Callable[[Equation], str] = _main
    streams: tuple[str, ...] = ()
    order: Callable[[Step], Step] = field(default=_same)
    passes: tuple[Callable[[Step], Step], ...] = ()
    split: str | None = None


def orchestration(given: "Orchestration | Callable[[Equation], str]") -> Orchestration:
    """An orchestration, or the one that a function from equation to stream is: `keys_aside` is keys-aside."""
    if isinstance(given, Orchestration):
        return given
    name: str = getattr(given, "__name__", type(given).__name__)
    return Orchestration(name.replace("_", "-"), given)
