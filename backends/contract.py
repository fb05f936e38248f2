"""The contract of a rule, held against what it gives in the first run of an executable, and on the hostile machine.

A result that lies in an operand's memory would be right as long as nothing
reuses that memory: on a device that queues, that is by luck.  So a result has
memory of its own, unless its op says that it is a view: then it lies in that
operand and nowhere else, or what is done to one would not be seen in the other.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from mla_fx.backends.overlap import span
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, Launch


class ContractError(TypeError):
    """A rule gave what no rule may give: names the result, what it must be, and what it was."""


def check_results(
    launch: Launch, operands: Sequence[Any], results: Any, avals: Sequence[Aval], *, spent: bool = False
) -> None:
    """Raise `ContractError` unless the results of a launch on one rank are those of a rule; `avals` are theirs.

    `spent`: nobody else ever sees the operands, and a result may lie in their memory.
    """
    if not isinstance(results, tuple | list) or len(results) != len(avals):
        got = len(results) if isinstance(results, tuple | list) else type(results).__name__
        raise ContractError(f"a rule must give its {len(avals)} results as a tuple: got {got}")
    versions = {result: operands[position] for position, result in launch.op.written().items()}
    views = {result: operands[position] for result, position in launch.op.viewed().items()}
    held = {x.untyped_storage().data_ptr() for x in operands if isinstance(x, torch.Tensor) and _has_memory(x)}
    held = set() if spent else held
    for k, (name, result, aval) in enumerate(zip(launch.op.results, results, avals, strict=True)):
        if not isinstance(result, torch.Tensor) or result.dtype != DTYPES[aval.dtype] or result.shape != aval.shape:
            got = f"{result.dtype}{list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            raise ContractError(f"{name}: must be {aval}: got {got}")
        if k in versions:
            if result is not versions[k]:
                raise ContractError(f"{name}: is the next version of a state and must be it: got another tensor")
        elif k in views:
            if not _inside(result, views[k]):
                source = launch.op.views[name]
                raise ContractError(f"{name}: is a view of {source} and must lie in it: got memory elsewhere")
        elif result.numel() and result.untyped_storage().data_ptr() in held:
            raise ContractError(f"{name}: must have memory of its own: got a view of an operand")
        if k not in versions and not (result[:1] if launch.op.communicates else result).is_contiguous():
            raise ContractError(f"{name}: must be contiguous: got strides {result.stride()}")
    # What a collective gives of each rank is one piece: pieces of several results may lie in turn in what has arrived.
    pieces = list if launch.op.communicates else lambda result: [result]
    own = [(span(p), k) for k, x in enumerate(results) if k not in views and x.numel() for p in pieces(x)]
    for ((_, end), first), ((start, _), second) in pairwise(sorted(own)):
        if start < end:
            one, other = (launch.op.results[k] for k in sorted((first, second)))
            raise ContractError(f"{other}: must have memory of its own: got memory that {one} lies in too")


def _has_memory(operand: torch.Tensor) -> bool:
    """Whether a tensor has memory that another can lie in: one that a library has packed, out of sight, has none."""
    return bool(operand.numel()) and operand.layout is torch.strided


def _inside(result: torch.Tensor, source: Any) -> bool:
    """Whether a tensor lies in the memory of another."""
    if not result.numel():
        return True
    (start, end), (first, last) = span(result), span(source)
    same = result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return same and first <= start and end <= last
