"""CUDA rule of `ops.GroupedLinear`: torch's grouped product where it reads no count on the host, tiles elsewhere."""

import torch
from torch.nn import functional

from mla_fx.backends.cuda.calls.experts import by_tiles, grouped_product_takes
from mla_fx.backends.cuda.calls.product import product
from mla_fx.backends.device import Run


def rule(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, *, run: Run) -> tuple[torch.Tensor]:
    """Sums in float32, rounded once; results of rows behind the last count are as they come."""
    if not (rows.shape[0] and weight.shape[0]):
        return (rows.new_empty((rows.shape[0], weight.shape[1])),)
    if grouped_product_takes(rows, weight):
        ends = counts.cumsum(0).to(torch.int32)
        return (functional.grouped_mm(rows.contiguous(), weight.transpose(1, 2), offs=ends),)

    def tile(some: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return product(some, weight.index_select(0, expert).transpose(1, 2))

    return (by_tiles(rows, counts, tile, features=weight.shape[1], bytes_=weight[0].nbytes),)
