"""CPU rule of `ops.Swiglu`."""

from collections.abc import Sequence

import torch

from mla_fx.backends.common import swiglu
from mla_fx.backends.cpu.kernel import FORMATS, Tensors, function, room
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.cpu.together import one_by_one
from mla_fx.backends.device import Run


def several(xs: Tensors, *, runs: Sequence[Run]) -> Sequence[Tensors]:
    """Both factors in float32 (float64 beside float64), rounded once."""
    if not takes(xs[0]):
        return one_by_one(swiglu.rule, xs, runs=runs)
    x = xs[0]
    rows, features = len(x), x.shape[1] // 2
    outs = room(xs, rows, features)
    gated = function("mla_fx_swiglu", "iiiii")
    gated((xs, outs), FORMATS[x.dtype], x.stride(0), rows, features, torch.get_num_threads())
    return (outs,)
