"""Named orchestrations.  One of your own is an `Orchestration` like these, or a function from equation to stream.

An orchestration places and orders; what is computed is the step's.  Where one wants two micro-batches it says at which
scope (`split`), and what makes the step splits it; their equations are told apart by the scopes "batch.0" and
"batch.1".
"""

import re
from collections.abc import Callable, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Final

from attrs import evolve

from mla_fx.effects import MAIN, Equation, Orchestration, ScheduleError, Step, ops
from mla_fx.passes import prefetch_weights

#: Everything on one stream.
serial: Final = Orchestration("serial")


def _exchange(equation: Equation) -> str:
    return "comm" if isinstance(equation.op, ops.AllToAll) else MAIN


#: The exchange on a stream of its own, beside current attention on the main stream.
exchange_aside: Final = Orchestration("exchange-aside", _exchange, streams=("comm",))


def _current(equation: Equation) -> str:
    return "side" if isinstance(equation.op, ops.CurrentAttention | ops.ExpandedAttention) else MAIN


#: Current attention on a side stream, while the main stream packs and exchanges the history part.
attention_aside: Final = Orchestration("attention-aside", _current, streams=("side",))


def _shared(equation: Equation) -> str:
    return "side" if equation.within("shared_experts") else MAIN


def _shared_first(step: Step) -> Step:
    """In each feed-forward, the shared experts before the gate and the routed ones: they need the same tokens only."""

    def key(equation: Equation) -> str:
        return equation.tag.removesuffix(".shared_experts")

    runs = [list(run) for _, run in groupby(step.equations, key)]
    ordered = (equation for run in runs for equation in sorted(run, key=lambda e: not e.within("shared_experts")))
    return evolve(step, equations=tuple(ordered))


#: The shared experts of a layer on a side stream, beside the gate and the routed ones.
shared_experts_aside: Final = Orchestration("shared-experts-aside", _shared, streams=("side",), order=_shared_first)


def _in_turn(step: Step, times: Callable[[int, list[Equation]], list[tuple[int, int]]]) -> Step:
    """Equations of both micro-batches by `times`, which gives a time for each of the number-th's.

    Equations of no micro-batch stay between, and equal times keep the order.
    """
    ordered: list[Equation] = []
    for split, run in groupby(step.equations, lambda equation: equation.within("batch")):
        equations = list(run)
        if split:
            both = [[one for one in equations if one.within(f"batch.{number}")] for number in (0, 1)]
            timed = [pair for number, mine in enumerate(both) for pair in zip(times(number, mine), mine, strict=True)]
            equations = [equation for _, equation in sorted(timed, key=lambda pair: pair[0])]
        ordered += equations
    if not any(equation.within("batch") for equation in ordered):
        raise ScheduleError(f"{step.name}: must be split into micro-batches, as StepShape(split=...) does: got none")
    return evolve(step, equations=tuple(ordered))


def _exchanges(number: int, equations: list[Equation]) -> list[tuple[int, int]]:
    """0: up to the queries of all heads; 1: history attention and exchange; 2: the rest; one micro-batch, the other."""
    times, time = [], 0
    for equation in equations:
        time = 1 if isinstance(equation.op, ops.HistoryAttention) else time
        times.append((time, number))
        time = 2 if isinstance(equation.op, ops.AllToAll) else time
    return times


def _pipelined(step: Step) -> Step:
    return _in_turn(step, _exchanges)


#: The attention in two micro-batches: the exchange of the one on a stream of its own, beside the history attention of
#: the other.  Source: Helix Parallelism (arXiv 2507.07120), which calls it HOP-B.
batch_pipelined: Final = Orchestration(
    "batch-pipelined", _exchange, streams=("comm",), order=_pipelined, split="attention"
)


def _halves(number: int, equations: list[Equation]) -> list[tuple[int, int]]:
    """Half layers, of the second micro-batch half a layer later: at one time the attention of the one is issued before
    the feed-forward of the other, so that its collectives come first and run beside it."""
    times: list[tuple[int, int]] = []
    fed: set[int] = set()
    for equation in equations:
        found = re.search(r"\blayers\.(\d+)", equation.tag)
        layer = int(found[1]) if found else 0
        if equation.within("feed_forward"):
            fed.add(layer)
        times.append((2 * layer + (layer in fed) + number, int(layer in fed)))
    return times


def _dual(step: Step) -> Step:
    return _in_turn(step, _halves)


def _second(equation: Equation) -> str:
    return "side" if equation.within("batch.1") else MAIN


#: Two micro-batches of whole layers on two streams, the second half a layer behind: the attention of the one beside the
#: experts of the other.  Source: dual-batch overlap of DeepSeek-V3 (arXiv 2412.19437, section 3.4.2) and vLLM.
dual_batch: Final = Orchestration("dual-batch", _second, streams=("side",), order=_dual, split="layers")


def _prefetch(equation: Equation) -> str:
    return "prefetch" if isinstance(equation.op, ops.Prefetch) else MAIN


#: The weights that are read behind a collective come into the device's cache while it runs: a hint, which nothing waits
#: for.
prefetch: Final = Orchestration("prefetch", _prefetch, streams=("prefetch",), passes=(prefetch_weights,))

#: The named orchestrations, as the command line knows them.
NAMED: Final[Mapping[str, Orchestration]] = MappingProxyType(
    {
        one.name: one
        for one in (
            serial,
            exchange_aside,
            attention_aside,
            shared_experts_aside,
            batch_pipelined,
            dual_batch,
            prefetch,
        )
    }
)
