"""Ascend rule of `ops.AllToAll`, all ranks on one device.

The LSE's bits must arrive as they were.  A tensor operator may canonicalise a
NaN or flush a subnormal of its dtype, and as bf16 or fp16 half of an LSE can be
either; the decimal digits that some systems send instead lose values (below
2^-104, and the last bit just below powers of two).  So the lanes never meet a
floating operator: `pack` writes them through an integer view, what goes from
rank to rank here is the integer view of the payload, and `unpack` takes them
out through one.  A transfer between processes moves bytes and keeps this as it is.
"""

from collections.abc import Iterator, Sequence

import torch

from mla_fx.payload import pack

_INTEGERS = {2: torch.int16, 4: torch.int32}


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
