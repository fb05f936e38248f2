"""CPU rule of `ops.UnpermuteTokens`."""

from collections.abc import Sequence

import torch

from mla_fx.backends.cpu.kernel import FORMATS, Tensors, function, room
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.device import Run


def several(
    rows: Tensors,
    source: Tensors,
    weights: Tensors,
    *,
    runs: Sequence[Run],
) -> Sequence[Tensors]:
    """Sum in float32 (float64 beside float64), in the order of the experts' scores, rounded once."""
    if not takes(rows[0], source[0], weights[0]):
        return ([plain(*mine) for mine in zip(rows, source, weights, strict=True)],)
    (tokens, top), first = source[0].shape, rows[0]
    outs = room(rows, tokens, first.shape[1])
    bring, sizes = function("mla_fx_unpermute", "iiiiii"), (tokens, top, first.shape[1])
    bring((rows, source, weights, outs), FORMATS[first.dtype], first.stride(0), *sizes, torch.get_num_threads())
    return (outs,)


def plain(rows: torch.Tensor, source: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One expert of each token after the other."""
    out = torch.zeros(source.shape[0], rows.shape[1], dtype=weights.dtype)
    for of_pair, weight in zip(source.unbind(1), weights.unbind(1), strict=True):
        here = (of_pair >= 0).nonzero().squeeze(1)
        if len(here):
            part = rows.index_select(0, of_pair[here]).to(out.dtype)
            out.index_add_(0, here, part.mul_(weight[here].unsqueeze(1)))
    return out.to(rows.dtype)
