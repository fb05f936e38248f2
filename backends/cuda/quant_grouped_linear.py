"""CUDA rule of `ops.QuantGroupedLinear`: tiles of one expert's rows, multiplied as exact integers in float32.

There is no batched product of int8.  |q| <= 127 and |weight| <= 128, so a sum
over 1024 features stays below 2^24, where float32 has every integer: exact in
whatever order it is added up, also in TF32, which has these factors exactly.
The sums of the stretches are added up in int32.
"""

import torch

from mla_fx.backends.cuda.calls.experts import by_tiles
from mla_fx.backends.cuda.calls.quantise import quantise
from mla_fx.backends.device import Run

#: Features over which float32 adds up integers exactly: 1024 * 127 * 128 < 2^24.
STRETCH = 1024


def rule(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor, *, run: Run
) -> tuple[torch.Tensor]:
    """As `quant_linear`, the scale that of the row's expert; rows behind the last count are as they come."""
    if not (rows.shape[0] and weight.shape[0]):
        return (rows.new_empty((rows.shape[0], weight.shape[1])),)

    def tile(some: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        q, step = quantise(some, scale.dtype)
        total = _integers(q.to(torch.float32), weight.index_select(0, expert)).to(scale.dtype)
        return total.mul_(step).mul_(scale.index_select(0, expert).unsqueeze(1)).to(rows.dtype)

    return (by_tiles(rows, counts, tile, features=weight.shape[1], bytes_=weight[0].nbytes),)


def _integers(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`q` [n, rows, D] times `weight` [n, F, D] transposed, int32."""
    total = torch.zeros((*q.shape[:2], weight.shape[1]), dtype=torch.int32, device=q.device)
    for at in range(0, q.shape[2], STRETCH):
        part = weight[..., at : at + STRETCH].to(torch.float32).transpose(1, 2)
        total.add_(torch.bmm(q[..., at : at + STRETCH], part).to(torch.int32))
    return total
