"""Orchestrations: which stream each equation of a step runs on, and in which order they are issued."""

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
    """

    name: str
    stream: Callable[[Equation], str] = _main
    streams: tuple[str, ...] = ()
    order: Callable[[Step], Step] = field(default=_same)


def orchestration(given: "Orchestration | Callable[[Equation], str]") -> Orchestration:
    """An orchestration, or the one that a function from equation to stream is: `keys_aside` is keys-aside."""
    if isinstance(given, Orchestration):
        return given
    name: str = getattr(given, "__name__", type(given).__name__)
    return Orchestration(name.replace("_", "-"), given)
