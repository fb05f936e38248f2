"""CPU rule of `ops.Rope`."""

from collections.abc import Sequence

import torch

from mla_fx.backends.common import rope
from mla_fx.backends.cpu.kernel import FORMATS, Tensors, function, room
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.cpu.together import one_by_one
from mla_fx.backends.device import Run


def several(
    x: Tensors,
    cos: Tensors,
    sin: Tensors,
    *,
    runs: Sequence[Run],
    heads: int | None,
) -> Sequence[Tensors]:
    """Rotate in float32 (float64 beside float64), de-interleaving on the way; one rounding to the dtype of `x`."""
    if not (cos[0].dtype == torch.float32 and takes(x[0], cos[0], sin[0])):
        return one_by_one(rope.rule, x, cos, sin, runs=runs, heads=heads)
    first, count = x[0], heads or 1
    rows, features = len(first), cos[0].shape[1]
    outs = room(x, rows, features) if heads is None else room(x, rows, heads, features)
    rotate, sizes = function("mla_fx_rope", "iiiiiii"), (rows, count, features)
    strides = first.stride(0), first.shape[1] // count
    rotate((x, cos, sin, outs), FORMATS[first.dtype], *strides, *sizes, torch.get_num_threads())
    return (outs,)
