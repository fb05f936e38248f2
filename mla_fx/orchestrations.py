"""Orchestrations: which stream each call of a step goes to.

An orchestration is a function from a call to the name of a stream; `main` is
the stream on which inputs are ready and outputs are read.  One of your own is
a function like these.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from mla_fx.effects import MAIN, Call, ops
from mla_fx.effects.schedule import Placement


def serial(call: Call) -> str:
    """Everything on one stream."""
    return MAIN


def exchange_aside(call: Call) -> str:
    """The exchange on a stream of its own, beside current attention on the main stream."""
    return "comm" if isinstance(call.op, ops.AllToAll) else MAIN


def attention_aside(call: Call) -> str:
    """Current attention on a side stream, while the main stream packs and exchanges the history part."""
    return "side" if isinstance(call.op, ops.CurrentAttention) else MAIN


#: The named orchestrations, as the command line knows them.
NAMED: Final[Mapping[str, Placement]] = MappingProxyType(
    {"serial": serial, "exchange-aside": exchange_aside, "attention-aside": attention_aside}
)
