"""CPU rule of `ops.Rope`."""

from collections.abc import Sequence

import torch

from mla_fx.backends.common import rope
from mla_fx.backends.cpu.kernel import FORMATS, Tensors, function, room
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.cpu.together import one_by_one
from mla_fx.backends.device import Run


def several(
    xs: Tensors,
    cosines: Tensors,
    sines: Tensors,
    *,
    runs: Sequence[Run],
    heads: int | None,
) -> Sequence[Tensors]:
    """Rotate in float32 (float64 beside float64), de-interleaving on the way; one rounding to the dtype of `x`."""
    if not (cosines[0].dtype == torch.float32 and takes(xs[0], cosines[0], sines[0])):
        return one_by_one(rope.rule, xs, cosines, sines, runs=runs, heads=heads)
    x, count = xs[0], heads or 1
    rows, features = len(x), cosines[0].shape[1]
    outs = room(xs, rows, features) if heads is None else room(xs, rows, heads, features)
    rotate, sizes = function("mla_fx_rope", "iiiiiii"), (rows, count, features)
    strides = x.stride(0), x.shape[1] // count
    rotate((xs, cosines, sines, outs), FORMATS[x.dtype], *strides, *sizes, torch.get_num_threads())
    return (outs,)
