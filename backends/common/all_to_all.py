"""Both halves of `ops.AllToAll`: an output and its LSE's bits go as one message, which `payload` lays out.

The LSE's bits must arrive as they were.  A tensor operator may canonicalise a
NaN or flush a subnormal of its dtype, and as bf16 or fp16 half of an LSE can be
either; the decimal digits that some systems send instead lose values (below
2^-104, and the last bit just below powers of two).  So the lanes never meet a
floating operator: they are written and read through integer views, and what
goes from rank to rank is bits.
"""

import torch

from mla_fx.backends.common.payload import pack, unpack
from mla_fx.backends.device import Run
from mla_fx.effects import Group


def send(out: torch.Tensor, lse: torch.Tensor, *, run: Run, group: Group) -> torch.Tensor:
    """The payload of every rank."""
    return pack(out, lse, ranks=group.size)


def receive(
    moved: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, run: Run, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Own heads' outputs and LSEs of all ranks, in the order of the sources, where they have arrived."""
    tokens, heads, latent = out.shape
    return unpack(moved, (tokens, heads // group.size, latent))
