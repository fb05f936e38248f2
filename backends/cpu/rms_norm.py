"""CPU rule of `ops.RmsNorm`."""

from collections.abc import Sequence

import torch

from mla_fx.backends.common import rms_norm
from mla_fx.backends.cpu.kernel import FORMATS, Tensors, function, room
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.cpu.together import one_by_one
from mla_fx.backends.device import Run


def several(xs: Tensors, weights: Tensors, *, runs: Sequence[Run], epsilon: float) -> Sequence[Tensors]:
    """Squares summed in float32 (float64 beside float64), rounded once."""
    if not takes(xs[0], weights[0]):
        return one_by_one(rms_norm.rule, xs, weights, runs=runs, epsilon=epsilon)
    x, features = xs[0], len(weights[0])
    rows = len(x)
    outs = room(xs, rows, features)
    norm = function("mla_fx_rms_norm", "iiiifi")
    norm((xs, weights, outs), FORMATS[x.dtype], x.stride(0), rows, features, epsilon, torch.get_num_threads())
    return (outs,)
