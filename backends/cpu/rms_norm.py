"""CPU rule of `ops.RmsNorm`."""

from collections.abc import Sequence

import torch

from mla_fx.backends.common import rms_norm
from mla_fx.backends.cpu.kernel import FORMATS, Tensors, function, room
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.cpu.together import one_by_one
from mla_fx.backends.device import Run


def several(x: Tensors, weight: Tensors, *, runs: Sequence[Run], epsilon: float) -> Sequence[Tensors]:
    """Squares summed in float32 (float64 beside float64), rounded once."""
    if not takes(x[0], weight[0]):
        return one_by_one(rms_norm.rule, x, weight, runs=runs, epsilon=epsilon)
    first, features = x[0], len(weight[0])
    rows = len(first)
    outs = room(x, rows, features)
    norm = function("mla_fx_rms_norm", "iiiifi")
    norm((x, weight, outs), FORMATS[first.dtype], first.stride(0), rows, features, epsilon, torch.get_num_threads())
    return (outs,)
