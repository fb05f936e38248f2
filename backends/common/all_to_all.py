"""Both halves of `ops.AllToAll`: an output and its LSE's bits go as one message, which `payload` lays out.

The LSE's bits must arrive as they were.  A tensor operator may canonicalise a
NaN or flush a subnormal of its dtype, and as bf16 or fp16 half of an LSE can be
either; the decimal digits that some systems send instead lose values (below
2^-104, and the last bit just below powers of two).  So the lanes never meet a
floating operator: they are written and read through integer views, and what
goes from rank to rank is bits.
"""

from collections.abc import Sequence

import torch

from mla_fx.backends.common.payload import pack, unpack
from mla_fx.backends.device import Run
from mla_fx.backends.several import Several, side_by_side
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


def together(out: Sequence[torch.Tensor], lse: Sequence[torch.Tensor], *, group: Group) -> tuple[Several, Several]:
    """Every rank's part of what all have, without a payload: on the host a copy within a dtype moves bits."""
    outs, lses = side_by_side(out), side_by_side(lse)  # [W, T, H, L], [W, T, H]
    ranks, (tokens, heads, latent) = group.size, outs.shape[1:]
    own = heads // ranks
    outs = outs.view(ranks, tokens, ranks, own, latent).permute(2, 0, 1, 3, 4)
    lses = lses.view(ranks, tokens, ranks, own).permute(2, 0, 1, 3)
    return Several((), _copied(outs)), Several((), _copied(lses))


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)
