"""Emulated attention: FIA for the latent decode (TND), and the merge of its partial results.

What is refused is what CANN 9.1 refuses on an A2 (its tiling, and the aclnn
documentation where that is stricter), as far as the latent decode goes: D = 512
with rope 64, one KV head.  Other uses of these operators are refused as not
emulated.  Computed in float64 and rounded once, so closer than an NPU is.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator.operator import TILING_REFUSED, Operator, require

#: Arguments of aclnnFusedInferAttentionScoreV3 with their words, in order (op-plugin's call).
_FIA: Final[Mapping[str, str]] = MappingProxyType(
    {
        "query": "T",
        "key": "L",
        "value": "L",
        "pse_shift": "T",
        "atten_mask": "T",
        "query_ends": "I",
        "kv_lengths": "I",
        "dequant_scale1": "T",
        "quant_scale1": "T",
        "dequant_scale2": "T",
        "quant_scale2": "T",
        "quant_offset2": "T",
        "antiquant_scale": "T",
        "antiquant_offset": "T",
        "block_table": "T",
        "query_padding_size": "T",
        "kv_padding_size": "T",
        "key_antiquant_scale": "T",
        "key_antiquant_offset": "T",
        "value_antiquant_scale": "T",
        "value_antiquant_offset": "T",
        "key_shared_prefix": "T",
        "value_shared_prefix": "T",
        "shared_prefix_length": "I",
        "query_rope": "T",
        "key_rope": "T",
        "key_rope_antiquant_scale": "T",
        "num_heads": "i64",
        "scale": "d",
        "pre_tokens": "i64",
        "next_tokens": "i64",
        "layout": "s",
        "kv_heads": "i64",
        "sparse_mode": "i64",
        "inner_precise": "i64",
        "block_size": "i64",
        "antiquant_mode": "i64",
        "lse_flag": "b",
        "key_antiquant_mode": "i64",
        "value_antiquant_mode": "i64",
        "out": "O",
        "lse": "O",
    }
)
_MUST_BE_ABSENT = tuple(
    name
    for name, word in _FIA.items()
    if word == "T" and name not in ("query", "atten_mask", "block_table", "query_rope", "key_rope")
)
_LATENT, _ROPE, _MASK = 512, 64, 2048
_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


class _Fia:
    """The arguments by name."""

    def __init__(self, *arguments: Any) -> None:
        self.given = dict(zip(_FIA, arguments, strict=True))

    def __getattr__(self, name: str) -> Any:
        return self.given[name]


def _tiling(holds: bool, message: str) -> None:
    require(holds, message, TILING_REFUSED)


def check_fia(*arguments: Any) -> None:
    """What the operator refuses."""
    fia = _Fia(*arguments)
    if fia.query.numel() == 0:
        return  # the kernel for empty tensors looks at nothing
    require(fia.layout == "TND", f"input_layout: only TND is emulated: got {fia.layout}")
    _check_tensors(fia)
    _check_lengths(fia)
    if fia.block_table is not None:
        _check_paging(fia)
    _check_mask(fia)


def _check_tensors(fia: _Fia) -> None:
    query, tokens = fia.query, fia.query.shape[0]
    _tiling(query.dtype in (torch.float16, torch.bfloat16), f"query must be float16 or bfloat16: got {query.dtype}")
    _tiling(query.dim() == 3 and query.shape[2] == _LATENT, f"query must be [T, N, 512]: got {list(query.shape)}")
    _tiling(fia.num_heads == query.shape[1], f"num_heads must be N = {query.shape[1]}: got {fia.num_heads}")
    _tiling(fia.num_heads in _HEADS, f"num_heads must be one of {_HEADS} for D = 512: got {fia.num_heads}")
    _tiling(fia.kv_heads == 1, f"num_key_value_heads must be 1 for D = 512: got {fia.kv_heads}")
    for name in _MUST_BE_ABSENT:
        _tiling(fia.given[name] is None, f"{name} must be absent for D = 512")
    _tiling(len(fia.key) == len(fia.value) == 1, "key and value must be one tensor each where there is rope")
    key, value = fia.key[0], fia.value[0]
    for name, tensor in (("key", key), ("value", value)):
        _tiling(tensor.dtype == query.dtype, f"{name} must have the dtype of query, {query.dtype}: got {tensor.dtype}")
        _tiling(tensor.shape[-1] == _LATENT, f"{name} must have D = 512: got {tensor.shape[-1]}")
    _tiling(fia.query_rope is not None and fia.key_rope is not None, "query_rope and key_rope are needed for D = 512")
    rope = [tokens, fia.num_heads, _ROPE]
    _tiling(list(fia.query_rope.shape) == rope, f"query_rope must be {rope}: got {list(fia.query_rope.shape)}")
    rope = [*key.shape[:-1], _ROPE]
    _tiling(list(fia.key_rope.shape) == rope, f"key_rope must be {rope}: got {list(fia.key_rope.shape)}")
    for name in ("query_rope", "key_rope"):
        _tiling(fia.given[name].dtype == query.dtype, f"{name} must be {query.dtype}: got {fia.given[name].dtype}")
    _tiling(0 <= fia.inner_precise <= 3, f"inner_precise must be 0 to 3: got {fia.inner_precise}")
    _tiling(list(fia.out.shape) == list(query.shape), f"out must be {list(query.shape)}: got {list(fia.out.shape)}")
    if fia.lse_flag:
        shape = [tokens, fia.num_heads, 1]
        _tiling(fia.lse.dtype == torch.float32, f"softmax_lse must be float32: got {fia.lse.dtype}")
        _tiling(list(fia.lse.shape) == shape, f"softmax_lse must be {shape}: got {list(fia.lse.shape)}")


def _check_lengths(fia: _Fia) -> None:
    ends, keys, tokens = fia.query_ends, fia.kv_lengths, fia.query.shape[0]
    require(bool(ends), "actual_seq_lengths is needed for TND")
    require(bool(keys), "actual_seq_lengths_kv is needed for TND")
    _tiling(len(keys) == len(ends), f"actual_seq_lengths_kv must have {len(ends)} entries: got {len(keys)}")
    _tiling(_rises(ends), f"actual_seq_lengths must not fall, for TND it is cumulative: got {ends}")
    _tiling(ends[-1] == tokens, f"the last of actual_seq_lengths must be T = {tokens}: got {ends[-1]}")
    _tiling(min(keys) >= 0, f"actual_seq_lengths_kv must be at least 0: got {keys}")
    if fia.block_table is None:
        total = fia.key[0].shape[0]
        _tiling(fia.key[0].dim() == 3 and fia.key[0].shape[1] == 1, "key must be [T, 1, 512] without paging")
        _tiling(_rises(keys), f"actual_seq_lengths_kv must not fall, without paging it is cumulative: got {keys}")
        _tiling(keys[-1] == total, f"the last of actual_seq_lengths_kv must be {total}: got {keys[-1]}")


def _check_paging(fia: _Fia) -> None:
    table, key, size = fia.block_table, fia.key[0], fia.block_size
    _tiling(key.dim() in (3, 4), f"a paged key must have 3 or 4 axes (5, NZ, is not emulated): got {key.dim()}")
    _tiling(key.dim() == 3 or key.shape[1] == 1, f"a paged key must be [blocks, 1, size, 512]: got {list(key.shape)}")
    _tiling(16 <= size <= 1024 and size % 16 == 0, f"block_size must be a multiple of 16 in 16..1024: got {size}")
    _tiling(key.shape[-2] == size, f"block_size must be that of the cache, {key.shape[-2]}: got {size}")
    _tiling(table.dtype == torch.int32 and table.dim() == 2, f"block_table must be int32 [B, M]: got {table.dtype}")
    rows, columns = table.shape
    _tiling(columns > 0, f"block_table must have no empty axis: got {list(table.shape)}")
    batch = len(fia.query_ends)
    _tiling(rows == batch, f"block_table must have a row for each of {batch} requests: got {rows}")
    need = -(-max(fia.kv_lengths) // size)
    _tiling(columns >= need, f"block_table must have at least {need} columns: got {columns}")


def _check_mask(fia: _Fia) -> None:
    mode, mask = fia.sparse_mode, fia.atten_mask
    _tiling(mode in (0, 3, 4, 9), f"sparse_mode must be 0, 3, 4 or 9 for D = 512: got {mode}")
    require(mode in (0, 3), f"sparse_mode: only 0 and 3 are emulated: got {mode}")
    if mode == 0:
        require(mask is None, "atten_mask: with sparse_mode 0, only its absence is emulated")
    else:
        _tiling(mask is not None, f"atten_mask is needed for sparse_mode {mode}")
        shape = [size for size in mask.shape[:-2] if size != 1] + list(mask.shape[-2:])
        _tiling(shape == [_MASK, _MASK], f"atten_mask must be [2048, 2048] for sparse_mode 3: got {list(mask.shape)}")
        kinds = (torch.bool, torch.int8, torch.uint8)
        _tiling(mask.dtype in kinds, f"atten_mask must be bool, int8 or uint8: got {mask.dtype}")


def _rises(numbers: list[int]) -> bool:
    return all(a <= b for a, b in pairwise([0, *numbers]))


def fia_scratch(*arguments: Any) -> int:
    """Room for the queries, which is where the emulated operator keeps them while it runs."""
    fia = _Fia(*arguments)
    return sum(t.numel() * t.element_size() for t in (fia.query, fia.query_rope) if t is not None)


def begin_fia(workspace: torch.Tensor, *arguments: Any) -> None:
    """Put the queries into the workspace."""
    for stored, given in zip(_stored(workspace, _Fia(*arguments)), _given(_Fia(*arguments)), strict=True):
        stored.copy_(given)


def _given(fia: _Fia) -> list[torch.Tensor]:
    return [fia.query, fia.query_rope]


def _stored(workspace: torch.Tensor, fia: _Fia) -> list[torch.Tensor]:
    found, start = [], 0
    for given in _given(fia):
        end = start + given.numel() * given.element_size()
        found.append(workspace[start:end].view(given.dtype).view(given.shape))
        start = end
    return found


def run_fia(workspace: torch.Tensor, *arguments: Any) -> None:
    """Attend with the queries that the workspace holds; a row that sees no key gets 0 and +inf."""
    fia = _Fia(*arguments)
    query, query_rope = (part.double() for part in _stored(workspace, fia))
    start = 0
    for request, end in enumerate(fia.query_ends):
        rows = slice(start, end)
        c, rope = _keys(fia, request)
        scores = torch.einsum("tnl,kl->tnk", query[rows], c) + torch.einsum("tnr,kr->tnk", query_rope[rows], rope)
        scores = scores * fia.scale
        hidden = _hidden(fia, end - start, c.shape[0]).unsqueeze(1)
        scores = scores.masked_fill(hidden, -math.inf)
        lse = (
            torch.logsumexp(scores, -1, keepdim=True)
            if c.shape[0]
            else scores.new_full((*scores.shape[:2], 1), -math.inf)
        )
        unseen = lse == -math.inf
        weights = torch.exp(scores - lse.masked_fill(unseen, 0)).masked_fill(hidden, 0)
        values = c.masked_fill(hidden.all(0).all(0).unsqueeze(-1), 0)
        fia.out[rows] = torch.einsum("tnk,kl->tnl", weights, values).to(fia.out.dtype)
        if fia.lse_flag:
            fia.lse[rows] = lse.masked_fill(unseen, math.inf).float()
        start = end


def _keys(fia: _Fia, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent and rope of a request's keys, [K, 512] and [K, 64]."""
    lengths, parts = fia.kv_lengths, (fia.key[0], fia.key_rope)
    if fia.block_table is None:
        first = lengths[request - 1] if request else 0
        keys, ropes = (part[first : lengths[request], 0].double() for part in parts)
    else:
        count = lengths[request]
        blocks = fia.block_table[request, : -(-count // fia.block_size)].long()
        if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < fia.key[0].shape[0]:
            raise IndexError(f"block_table: ids must be in 0..{fia.key[0].shape[0] - 1}: got {blocks.tolist()}")
        rows = (part.flatten(1, -2).flatten(2) if part.dim() == 3 else part.flatten(1, 2) for part in parts)
        keys, ropes = (part[blocks].flatten(0, 1)[:count].double() for part in rows)
    return keys, ropes


def _hidden(fia: _Fia, queries: int, keys: int) -> torch.Tensor:
    """[S, K]: what the mask hides, with the mask's lower right corner at the last query and key (sparse_mode 3)."""
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if fia.sparse_mode == 3:
        mask = fia.atten_mask.view(_MASK, _MASK).bool()
        ahead = keys - queries  # keys that all queries but the masked ones see
        for query in range(queries):
            for key in range(max(ahead, 0), keys):
                column = key - ahead
                hidden[query, key] = mask[query, column] if column < _MASK else True
    return hidden


def check_update(lse: list[Any], parts: list[Any], update_type: int, out: torch.Tensor, merged: Any) -> None:
    """At most 16 parts (until CANN 9.1), D a multiple of 8 up to 512, equal dtypes."""
    require(len(lse) == len(parts), f"lse and local_out must have one length: got {len(lse)} and {len(parts)}")
    require(1 <= len(parts) <= 16, f"local_out must have 1 to 16 parts: got {len(parts)}")
    require(update_type in (0, 1), f"update_type must be 0 or 1: got {update_type}")
    rows, features = parts[0].shape
    require(8 <= features <= 512 and features % 8 == 0, f"head_dim must be a multiple of 8 in 8..512: got {features}")
    for one, part in zip(lse, parts, strict=True):
        require(one.dtype == torch.float32, f"lse must be float32: got {one.dtype}")
        require(list(one.shape) == [rows], f"lse must be [{rows}]: got {list(one.shape)}")
        require(part.dtype == parts[0].dtype, f"local_out must have one dtype: got {part.dtype} and {parts[0].dtype}")
        require(list(part.shape) == [rows, features], f"local_out must have one shape: got {list(part.shape)}")


def run_update(lse: list[Any], parts: list[Any], update_type: int, out: torch.Tensor, merged: Any) -> None:
    """Weigh the parts in float32.  +inf counts as -inf; where every part is that, the row is NaN."""
    each = torch.stack(lse)
    each = each.masked_fill(each == math.inf, -math.inf)
    peak = each.amax(0)
    total = peak + torch.log(torch.exp(each - peak).sum(0))
    weights = torch.exp(each - total).unsqueeze(-1)
    out.copy_(sum(weight * part.float() for weight, part in zip(weights, parts, strict=True)))
    if update_type == 1:
        merged.copy_(total)


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "aclnnFusedInferAttentionScoreV3": Operator(
            " ".join(_FIA.values()), run_fia, check_fia, scratch=fia_scratch, begin=begin_fia
        ),
        "aclnnAttentionUpdate": Operator("L L i64 O O", run_update, check_update),
    }
)
