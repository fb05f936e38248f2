"""CPU rule of `ops.UnpermuteTokens`."""

import torch

from mla_fx.backends.cpu.kernel import FORMATS, function
from mla_fx.backends.cpu.pointwise import takes
from mla_fx.backends.device import Run


def rule(rows: torch.Tensor, source: torch.Tensor, weights: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Sum in float32 (float64 beside float64), in the order of the experts' scores, rounded once."""
    if not takes(rows, source, weights):
        return (plain(rows, source, weights),)
    (tokens, top), features = source.shape, rows.shape[1]
    out = rows.new_empty(tokens, features)
    at = rows.data_ptr(), rows.stride(0), source.data_ptr(), weights.data_ptr(), out.data_ptr()
    bring = function("mla_fx_unpermute", "iplpppllli")
    bring(FORMATS[rows.dtype], *at, tokens, top, features, torch.get_num_threads())
    return (out,)


def plain(rows: torch.Tensor, source: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One expert of each token after the other."""
    out = torch.zeros(source.shape[0], rows.shape[1], dtype=weights.dtype)
    for of_pair, weight in zip(source.unbind(1), weights.unbind(1), strict=True):
        here = (of_pair >= 0).nonzero().squeeze(1)
        if len(here):
            part = rows.index_select(0, of_pair[here]).to(out.dtype)
            out.index_add_(0, here, part.mul_(weight[here].unsqueeze(1)))
    return out.to(rows.dtype)
