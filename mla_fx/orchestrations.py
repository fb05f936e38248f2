"""Named orchestrations.  One of your own is an `Orchestration` like these, or a function from equation to stream."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from mla_fx.effects import MAIN, Equation, Orchestration, ops

#: Everything on one stream.
serial: Final = Orchestration("serial")


def _exchange(equation: Equation) -> str:
    return "comm" if isinstance(equation.op, ops.AllToAll) else MAIN


#: The exchange on a stream of its own, beside current attention on the main stream.
exchange_aside: Final = Orchestration("exchange-aside", _exchange, streams=("comm",))


def _current(equation: Equation) -> str:
    return "side" if isinstance(equation.op, ops.CurrentAttention) else MAIN


#: Current attention on a side stream, while the main stream packs and exchanges the history part.
attention_aside: Final = Orchestration("attention-aside", _current, streams=("side",))

#: The named orchestrations, as the command line knows them.
NAMED: Final[Mapping[str, Orchestration]] = MappingProxyType(
    {one.name: one for one in (serial, exchange_aside, attention_aside)}
)
