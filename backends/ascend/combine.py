"""Ascend rule of `ops.Combine`: npu_attention_update over the parts of all ranks and the local one.

The operator weighs in float32 and reads parts in the payload's dtype, so
nothing is widened on the way.  Two things it does not do: a part that saw no
key may hold NaN, which weight 0 does not wash out, and a row that no part saw
comes out as NaN.  The first is selected away in a copy, the second behind it.

More parts than it takes are merged in groups, and what comes of the groups,
with the LSEs that the operator gives, again; in float32 until the end, so that
the result is rounded once.
"""

import math

import torch

from mla_fx.backends.ascend.calls import release
from mla_fx.backends.ascend.calls.dtypes import wrong_dtype
from mla_fx.backends.ascend.calls.merge import update
from mla_fx.backends.device import Run
from mla_fx.effects import Aval, ops


def parts(cann: tuple[int, int]) -> int:
    """The most that the operator merges at once, on A2 and A3 (attention_update_tiling.cpp of ops-transformer)."""
    return 128 if cann >= (9, 1) else 16


def takes(op: ops.Combine, recv: Aval, *others: Aval) -> str | None:
    """Dtypes that the operator takes."""
    return wrong_dtype("recv", recv)


def rule(
    recv: torch.Tensor,
    recv_lse: torch.Tensor,
    local: torch.Tensor,
    local_lse: torch.Tensor,
    *,
    run: Run,
    flat: bool,
) -> tuple[torch.Tensor]:
    """One normalisation over all parts, the local one last."""
    tokens, heads, latent = local.shape
    if not tokens:
        return (local.new_empty((0, heads * latent) if flat else (0, heads, latent)),)
    lse = torch.cat((recv_lse, local_lse.unsqueeze(0))).flatten(1)
    unseen = lse.isinf()
    hidden = unseen.view(-1, tokens, heads, 1)
    given = [*recv.masked_fill(hidden[:-1], 0), local.masked_fill(hidden[-1], 0)]
    rows, most = [part.reshape(-1, latent) for part in given], parts(release.cann())
    if len(rows) > most:
        rows = [part.to(torch.float32) for part in rows]
    while len(rows) > most:
        several = [slice(start, start + most) for start in range(0, len(rows), most)]
        found = [_group(rows[some], lse[some], unseen[some]) for some in several]
        rows = [row for row, *_ in found]
        lse, unseen = (torch.stack(of_groups) for of_groups in list(zip(*found, strict=True))[1:])
    merged, _ = update(lse, rows, 0)
    merged = merged.masked_fill(unseen.all(0).unsqueeze(-1), 0)
    return (merged.view((tokens, heads * latent) if flat else (tokens, heads, latent)).to(local.dtype),)


def _group(
    rows: list[torch.Tensor], lse: torch.Tensor, unseen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some parts as one: its rows, its LSE, -inf where none of them saw a key, and where that is."""
    merged, total = update(lse, rows, 1)
    none = unseen.all(0)
    return merged.masked_fill(none.unsqueeze(-1), 0), total.masked_fill(none, -math.inf), none
