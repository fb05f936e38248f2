"""CUDA rule of `ops.AllToAll`, all ranks on one device.

The lanes of an LSE are bits and not numbers, so what goes from rank to rank is
the integer view of the payload: no floating operator meets them.
"""

from collections.abc import Iterator, Sequence

import torch

from mla_fx.payload import pack

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def rule(operands: Sequence[tuple[torch.Tensor, torch.Tensor]], *, ranks: int) -> Iterator[tuple[torch.Tensor] | None]:
    """Every rank packs for all; then rank r copies the r-th part of each, in the order of the sources."""
    sent = []
    for out, lse in operands:
        sent.append(pack(out, lse, ranks=ranks))
        yield None
    dtype = sent[0].dtype
    for rank in range(ranks):
        parts = [payload.view(_INTEGERS[dtype.itemsize])[rank] for payload in sent]
        yield (torch.stack(parts).view(dtype),)
