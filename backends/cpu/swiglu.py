"""CPU rule of `ops.Swiglu`."""

from collections.abc import Sequence

import torch

from mla_fx.backends.common import swiglu
from mla_fx.backends.cpu.kernel import FORMATS, Tensors, function, room
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.cpu.together import one_by_one
from mla_fx.backends.device import Run


def several(x: Tensors, *, runs: Sequence[Run]) -> Sequence[Tensors]:
    """Both factors in float32 (float64 beside float64), rounded once."""
    if not takes(x[0]):
        return one_by_one(swiglu.rule, x, runs=runs)
    first = x[0]
    rows, features = len(first), first.shape[1] // 2
    outs = room(x, rows, features)
    gated = function("mla_fx_swiglu", "iiiii")
    gated((x, outs), FORMATS[first.dtype], first.stride(0), rows, features, torch.get_num_threads())
    return (outs,)
