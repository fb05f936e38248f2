"""Dynamic W8A8 in float32, which the 8-bit operators do not take: the same integers by float32 products.

Sums of integers below 2^24 are exact in float32, whatever the order: those of
1024 products of 8-bit numbers are.  Longer sums are made of such pieces, added
up as int32.  Weights are widened in every call; this is for precision, not for speed.
"""

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from mla_fx.backends.ascend.calls.grouped import grouped

_PIECE = 1024  # 1024 * 127 * 128 < 2^24


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` float32 [T, D] in steps of max |x| / 127 for each token: integers, as float32, and steps [T]."""
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_zeros((x.shape[0],))
    step = x.abs().amax(1) / 127
    return torch.round(x / step.masked_fill(step == 0, 1).unsqueeze(1)), step


def total(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """sum_d q[t, d] * weight[f, d], exact: `q` [T, D], `weight` int8 [F, D] -> float32 [T, F]."""
    return _added_up(q, weight, functional.linear)


def grouped_total(q: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The same for each expert's rows: `q` [Z, D], `weight` int8 [Y, F, D], `counts` [Y] -> float32 [Z, F]."""
    return _added_up(q, weight, lambda piece, part: grouped(piece, part, counts))


def _added_up(
    q: torch.Tensor, weight: torch.Tensor, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    found = (product(q[:, piece], weight[..., piece].to(torch.float32)) for piece in _pieces(q.shape[1]))
    first, *rest = found
    if not rest:
        return first
    exact = first.to(torch.int32)
    for part in rest:
        exact = exact + part.to(torch.int32)
    return exact.to(torch.float32)


def _pieces(inner: int) -> Iterator[slice]:
    for start in range(0, max(inner, 1), _PIECE):
        yield slice(start, start + _PIECE)


def experts_of_rows(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """The expert of each row, [Z]: how many experts end before it.  Rows behind them count as the last one's."""
    ends = counts.cumsum(0)[:-1]
    numbers = torch.arange(rows, dtype=torch.int64, device=counts.device)
    return (numbers.unsqueeze(1) >= ends).to(torch.int64).sum(1)
