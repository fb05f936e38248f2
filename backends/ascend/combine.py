"""Ascend rule of `ops.Combine`: npu_attention_update over the parts of all ranks and the local one.

The operator weighs in float32 and reads parts in the payload's dtype, so
nothing is widened on the way.  Two things it does not do: a part that saw no
key may hold NaN, which weight 0 does not wash out, and a row that no part saw
comes out as NaN.  The first is selected away in a copy, the second behind it.
"""

import math

import torch

from mla_fx.backends.ascend.calls.dtypes import wrong_dtype
from mla_fx.backends.device import Run
from mla_fx.effects import Aval, ops

#: Parts that the operator takes on every CANN (9.1 takes 128 on A2 and A3).
PARTS = 16


def takes(op: ops.Combine, recv: Aval, *others: Aval) -> str | None:
    """Ranks and features that the operator takes."""
    ranks, latent = recv.shape[0], recv.shape[3]
    if ranks + 1 > PARTS:
        return f"ranks: combine on ascend merges at most {PARTS - 1} and the local part: got {ranks}"
    if latent % 8 or not 8 <= latent <= 512:
        return f"L: combine on ascend needs a multiple of 8 in 8..512: got {latent}"
    return wrong_dtype("recv", recv)


def rule(
    recv: torch.Tensor, recv_lse: torch.Tensor, local: torch.Tensor, local_lse: torch.Tensor, *, run: Run
) -> tuple[torch.Tensor]:
    """One normalisation over all parts, the local one last."""
    tokens, heads, latent = local.shape
    if not tokens:
        return (torch.empty_like(local, memory_format=torch.contiguous_format),)
    lse = torch.cat((recv_lse, local_lse.unsqueeze(0)))
    unseen = lse == -math.inf
    parts = recv.masked_fill(unseen[:-1].unsqueeze(-1), 0)
    local = local.masked_fill(unseen[-1].unsqueeze(-1), 0)
    rows = [part.reshape(-1, latent) for part in (*parts, local)]
    merged, _ = torch.ops.npu.npu_attention_update([one.flatten() for one in lse], rows, 0)
    return (merged.view(tokens, heads, latent).masked_fill(unseen.all(0).unsqueeze(-1), 0),)
