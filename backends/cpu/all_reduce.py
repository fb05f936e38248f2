"""CPU rule of `ops.AllReduce`: where all ranks are here, the sum is one call of the compiled library."""

from collections.abc import Sequence
from typing import Final

import torch

from mla_fx.backends.common import all_reduce as shared
from mla_fx.backends.cpu.kernel import FORMATS, function
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.several import side_by_side
from mla_fx.backends.table import Collective
from mla_fx.effects import Group


def together(x: Sequence[torch.Tensor], *, group: Group) -> tuple[torch.Tensor]:
    """The sum in float32 (float64 beside float64) and in the order of the ranks, rounded once, for all of them."""
    if not takes(x[0], x[0]):
        return shared.together(x, group=group)
    parts, out = side_by_side(x), torch.empty_like(x[0])
    sizes = parts.stride(0), len(parts), out.numel()
    function("mla_fx_sum", "iiiii")(((parts,), (out,)), FORMATS[out.dtype], *sizes, torch.get_num_threads())
    return (out,)


rule: Final = Collective(shared.send, shared.receive, together)
