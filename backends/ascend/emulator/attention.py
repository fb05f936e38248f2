"""Emulated attention: FIA for the latent decode and for a prompt, in both of its versions.

Refused is what CANN refuses on an A2 (the checks of its tiling, and the aclnn documentation where nothing is checked),
as far as the latent decode goes: D = 512 with rope 64, one KV head; and a prompt of expanded heads: D = 128 with rope
64, as many KV heads as query heads, TND without paging.  Documented, but not checked, is less: paging with
TND, no LSE, up to 16 queries a request; that is not refused here, and no NPU has confirmed it.  Other uses are refused
as not emulated.  Computed in float64 and rounded once, so closer than an NPU is.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator.attention_checks import MASK, check
from mla_fx.backends.ascend.emulator.fia import V3, V4, Fia
from mla_fx.backends.ascend.emulator.operator import Operator

#: What a mask adds to a score, in float32; where it hides every key, the scores themselves are lost in it.
_MASKED = -1e12


#: Keys that a core takes at a time, of which it notes a maximum and a sum for every query.
_PIECE = 128


def scratch(fia: Fia) -> int:
    """Room for the queries, which is where the emulated operator keeps them while it runs, and for its notes."""
    spans = zip(fia.query_spans(), fia.key_spans(), strict=True)
    return _room(fia, sum((end - start) * -(-(last - first) // _PIECE) for (start, end), (first, last) in spans))


def most(fia: Fia) -> int:
    """The same with all keys that there is room for; as the real one, it looks at shapes and at no length."""
    rows = fia.rows(fia.query, fia.layout, fia.num_heads)
    if fia.block_table is not None:
        keys = fia.block_table.shape[1] * fia.block_size
    else:
        keys = fia.rows(fia.key[0], fia.layout, 1).shape[0 if fia.packed else 1]
    return _room(fia, math.prod(rows.shape[: 1 if fia.packed else 2]) * -(-keys // _PIECE))


def _room(fia: Fia, pieces: int) -> int:
    return sum(part.nbytes for part in _given(fia)) + 8 * int(fia.num_heads) * pieces


def begin(workspace: torch.Tensor, fia: Fia) -> None:
    """Put the queries into the workspace."""
    for stored, given in zip(_stored(workspace, fia), _given(fia), strict=True):
        stored.copy_(given)


def _given(fia: Fia) -> list[torch.Tensor]:
    return [part for part in (fia.query, fia.query_rope) if part is not None]


def _stored(workspace: torch.Tensor, fia: Fia) -> list[torch.Tensor]:
    found, start = [], 0
    for given in _given(fia):
        end = start + given.numel() * given.element_size()
        found.append(workspace[start:end].view(given.dtype).view(given.shape))
        start = end
    return found


def run(workspace: torch.Tensor, fia: Fia) -> None:
    """Attend with the queries that the workspace holds; a row that sees no key gets 0 and +inf."""
    stored = [fia.rows(part, fia.layout, fia.num_heads).double() for part in _stored(workspace, fia)]
    out, lse = torch.zeros_like(stored[0]), torch.full((*stored[0].shape[:-1], 1), math.inf, dtype=torch.float64)
    for request, ((start, end), keys) in enumerate(zip(fia.query_spans(), fia.key_spans(), strict=True)):
        place: Any = slice(start, end) if fia.packed else (request, slice(start, end))
        key, rope, value = _keys(fia, request, keys)
        if key.shape[0]:
            query, query_rope = (part[place] for part in stored)
            out[place], lse[place] = _attend(fia, request, query, query_rope, key, rope, value)
    fia.rows(fia.out, fia.out_layout, fia.num_heads).copy_(out)
    if fia.softmax_lse_flag:
        fia.softmax_lse.copy_(lse if fia.packed else lse.transpose(1, 2))


def _attend(
    fia: Fia,
    request: int,
    query: torch.Tensor,
    query_rope: torch.Tensor,
    key: torch.Tensor,
    rope: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [S, N, ...] over keys and values [K, ...], or [K, N, ...], K > 0."""
    per = "kn" if fia.prompt else "k"
    scores = torch.einsum(f"snl,{per}l->snk", query, key) + torch.einsum(f"snr,{per}r->snk", query_rope, rope)
    scores = scores * fia.scale
    unseen = torch.zeros(query.shape[0], dtype=torch.bool)
    if fia.sparse_mode == 3:
        hidden = _behind(fia, query.shape[0], len(key))
        scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
        values, unseen = values.masked_fill(hidden.all(0).view(-1, *[1] * (values.dim() - 1)), 0), hidden.all(1)
    elif fia.atten_mask is not None:
        mask = fia.atten_mask.flatten(0, -3)  # one for each request, or one for all
        hidden = mask[request % mask.shape[0], : query.shape[0], : len(key)].bool()
        scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf).masked_fill(hidden.all(1)[:, None, None], _MASKED)
        unseen = hidden.all(1) & bool(fia.inner_precise & 2)
    scores = scores.masked_fill(unseen[:, None, None], 0)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    out = torch.einsum(f"snk,{per}l->snl", torch.exp(scores - lse), values)
    blind = unseen[:, None, None]
    return out.masked_fill(blind, 0), lse.masked_fill(blind, math.inf)


def _keys(fia: Fia, request: int, span: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a request's keys the latent and rope, [K, 512] and [K, 64], and the latent again; of a prompt [K, N, ...]."""
    start, end = span
    if fia.prompt:
        key, rope, value = (part[start:end].double() for part in (fia.key[0], fia.key_rope, fia.value[0]))
        return key, rope, value
    parts = (fia.key[0], fia.key_rope)
    if fia.block_table is None:
        flat = (fia.rows(part, fia.layout, 1) for part in parts)
        first, second = (part[start:end, 0] if fia.packed else part[request, start:end, 0] for part in flat)
        return first.double(), second.double(), first.double()
    blocks = fia.block_table[request, : -(-end // fia.block_size)].long()
    if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < fia.key[0].shape[0]:
        raise IndexError(f"block_table: ids must be in 0..{fia.key[0].shape[0] - 1}: got {blocks.tolist()}")
    paged = (part if part.dim() == 3 else part[:, 0] for part in parts)  # [blocks, size, D]
    first, second = (part[blocks].flatten(0, 1)[:end] for part in paged)
    return first.double(), second.double(), first.double()


def _behind(fia: Fia, queries: int, keys: int) -> torch.Tensor:
    """[S, K]: what the mask hides, with the mask's lower right corner at the last query and key (sparse_mode 3)."""
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    mask = fia.atten_mask.view(MASK, MASK).bool()
    ahead = keys - queries  # keys that all queries but the masked ones see
    for query in range(queries):
        for key in range(max(ahead, 0), keys):
            column = key - ahead
            hidden[query, key] = mask[query, column] if column < MASK else True
    return hidden


def _operator(names: Mapping[str, str], version: int) -> Operator:
    def of(function: Callable[[Fia], Any]) -> Callable[..., Any]:
        return lambda *arguments: function(Fia(names, arguments))

    def within(function: Callable[[torch.Tensor, Fia], Any]) -> Callable[..., Any]:
        return lambda workspace, *arguments: function(workspace, Fia(names, arguments))

    signature = " ".join(names.values())
    return Operator(signature, within(run), of(partial(check, version)), of(scratch), within(begin), of(most))


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "aclnnFusedInferAttentionScoreV3": _operator(V3, 1),
        "aclnnFusedInferAttentionScoreV4": _operator(V4, 2),
    }
)
