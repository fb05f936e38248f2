"""What fused infer attention score refuses of the latent decode and of a prompt; see `attention`."""

import re
from itertools import pairwise

import torch

from mla_fx.backends.ascend.emulator.fia import ABSENT, LAYOUTS, RENAMED, Fia
from mla_fx.backends.ascend.emulator.operator import RefusedError, require, tiling

LATENT, PROMPT, ROPE, MASK = 512, 128, 64, 2048
_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


def check(version: int, fia: Fia) -> None:
    """Raise `RefusedError` in the words of `version`, 1 or 2."""
    try:
        if fia.query.numel() and fia.key and fia.key[0].numel():  # the kernel for empty tensors looks at nothing
            _check(fia)
    except RefusedError as error:
        if version == 1:
            raise
        words = re.sub(r"\w+", lambda word: RENAMED.get(word[0], word[0]), str(error))
        raise RefusedError(words, error.status) from None


def _check(fia: Fia) -> None:
    layouts = ", ".join(LAYOUTS)
    require(fia.input_layout in LAYOUTS, f"input_layout: only {layouts} are emulated: got {fia.input_layout}")
    _check_tensors(fia)
    _check_results(fia)
    _check_query_lengths(fia)
    _check_key_lengths(fia)
    if fia.block_table is not None:
        _check_paging(fia)
    _check_mask(fia)


def _check_tensors(fia: Fia) -> None:
    query, heads = fia.query, fia.num_heads
    tiling(query.dtype in (torch.float16, torch.bfloat16), f"query must be float16 or bfloat16: got {query.dtype}")
    if not fia.prompt:
        tiling(heads in _HEADS, f"num_heads must be one of {_HEADS} for D = 512: got {heads}")
    axes = len(fia.layout)
    tiling(query.dim() == axes, f"query must have {axes} axes in {fia.layout}: got {list(query.shape)}")
    if fia.layout == "BSH":
        wide = heads * LATENT
        tiling(query.shape[2] == wide, f"query must have {heads} * 512 features: got {query.shape[2]}")
    rows = fia.rows(query, fia.layout, heads)
    width = rows.shape[-1]
    require(width in (LATENT, PROMPT), f"query: only D = 512 and D = 128 are emulated: got {width}")
    tiling(rows.shape[-2] == heads, f"num_heads must be N = {rows.shape[-2]}: got {heads}")
    if fia.prompt:
        _check_prompt(fia)
    else:
        count = fia.num_key_value_heads
        tiling(count == 1, f"num_key_value_heads must be 1 for D = 512: got {count}")
    for name in ABSENT:
        tiling(fia.given[name] is None, f"{name} must be absent for D = {width}")
    for name, tensor in (("key", fia.key[0]), ("value", fia.value[0])):
        tiling(tensor.dtype == query.dtype, f"{name} must have the dtype of query, {query.dtype}: got {tensor.dtype}")
        tiling(tensor.shape[-1] == width, f"{name} must have D = {width}: got {tensor.shape[-1]}")
    _check_rope(fia)


def _check_prompt(fia: Fia) -> None:
    plain = fia.input_layout == "TND" and fia.block_table is None
    require(plain, f"query: D = 128 is emulated in TND without paging: got {fia.input_layout}")
    heads, count = fia.num_heads, fia.num_key_value_heads
    require(count in (0, heads), f"num_key_value_heads: only N = {heads} is emulated for D = 128: got {count}")
    require(fia.sparse_mode in (0, 3), f"sparse_mode: only 0 and 3 are emulated for D = 128: got {fia.sparse_mode}")
    key, value = (list(part[0].shape) for part in (fia.key, fia.value))
    tiling(key[1:2] == [heads], f"key must have {heads} heads for D = 128: got {key}")
    tiling(value == key, f"value must have the shape of key, {key}: got {value}")


def _check_rope(fia: Fia) -> None:
    both = fia.query_rope is not None and fia.key_rope is not None
    require(both or not fia.prompt, "query_rope and key_rope: only D = 128 with both is emulated")
    tiling(both, "query_rope and key_rope are needed for D = 512")
    features = fia.num_heads * ROPE if fia.layout == "BSH" else ROPE
    for name, shape, dtype in (
        ("query_rope", [*fia.query.shape[:-1], features], fia.query.dtype),
        ("key_rope", [*fia.key[0].shape[:-1], ROPE], fia.key[0].dtype),
    ):
        rope: torch.Tensor = getattr(fia, name)
        tiling(list(rope.shape) == shape, f"{name} must be {shape}: got {list(rope.shape)}")
        tiling(rope.dtype == dtype, f"{name} must be {dtype}: got {rope.dtype}")
    tiling(0 <= fia.inner_precise <= 3, f"inner_precise must be 0 to 3: got {fia.inner_precise}")


def _check_results(fia: Fia) -> None:
    out, shape = fia.out, fia.out_shape()
    tiling(list(out.shape) == shape, f"out must be {shape}: got {list(out.shape)}")
    tiling(out.dtype == fia.query.dtype, f"out must be {fia.query.dtype}: got {out.dtype}")
    if fia.softmax_lse_flag:
        lse, shape = fia.softmax_lse, fia.lse_shape()
        tiling(lse.dtype == torch.float32, f"softmax_lse must be float32: got {lse.dtype}")
        tiling(list(lse.shape) == shape, f"softmax_lse must be {shape}: got {list(lse.shape)}")


def _check_query_lengths(fia: Fia) -> None:
    ends, batch = fia.actual_seq_lengths, fia.query.shape[0]
    if not fia.packed:
        places = fia.rows(fia.query, fia.layout, fia.num_heads).shape[1]
        if ends:
            _one_for_each("actual_seq_lengths", ends, batch)
            within = all(0 <= length <= places for length in ends)
            tiling(within, f"actual_seq_lengths must be in 0..S = {places}: got {ends}")
        return
    require(bool(ends), "actual_seq_lengths is needed for TND")
    tiling(_rises(ends), f"actual_seq_lengths must not fall, for TND it is cumulative: got {ends}")
    tiling(ends[-1] == batch, f"the last of actual_seq_lengths must be T = {batch}: got {ends[-1]}")


def _check_key_lengths(fia: Fia) -> None:
    keys, key, paged = fia.actual_seq_lengths_kv, fia.key[0], fia.block_table is not None
    if not paged:
        axes = len(fia.layout)
        tiling(key.dim() == axes, f"key must have {axes} axes without paging in {fia.layout}: got {list(key.shape)}")
        heads = 1 if fia.layout == "BSH" else fia.rows(key, fia.layout, 1).shape[-2]
        tiling(heads == 1 or fia.prompt, f"key must have 1 head without paging: got {list(key.shape)}")
    if not keys:
        tiling(not paged, "actual_seq_lengths_kv is needed with paging")
        require(not fia.packed, "actual_seq_lengths_kv is needed for TND")
        return
    tiling(min(keys) >= 0, f"actual_seq_lengths_kv must be at least 0: got {keys}")
    if fia.packed:
        count = fia.requests()
        tiling(len(keys) == count, f"actual_seq_lengths_kv must have {count} entries: got {len(keys)}")
    else:
        _one_for_each("actual_seq_lengths_kv", keys, fia.requests())
    if fia.packed and not paged:
        total = key.shape[0]
        tiling(_rises(keys), f"actual_seq_lengths_kv must not fall, without paging it is cumulative: got {keys}")
        tiling(keys[-1] == total, f"the last of actual_seq_lengths_kv must be {total}: got {keys[-1]}")
    elif not paged:
        batch, places = fia.rows(key, fia.layout, 1).shape[:2]
        tiling(batch == fia.requests(), f"key must have {fia.requests()} requests: got {batch}")
        tiling(max(keys) <= places, f"actual_seq_lengths_kv must be at most {places}: got {keys}")


def _one_for_each(name: str, lengths: list[int], batch: int) -> None:
    fit = len(lengths) == 1 or len(lengths) >= batch
    tiling(fit, f"{name} must have 1 or at least {batch} entries: got {len(lengths)}")


def _check_paging(fia: Fia) -> None:
    table, key, size = fia.block_table, fia.key[0], fia.block_size
    require(key.dim() != 5, "a paged key of 5 axes (NZ) is not emulated")
    tiling(key.dim() in (3, 4), f"a paged key must have 3 to 5 axes: got {key.dim()}")
    tiling(key.dim() == 3 or key.shape[1] == 1, f"a paged key must be [blocks, 1, size, 512]: got {list(key.shape)}")
    tiling(16 <= size <= 1024 and size % 16 == 0, f"block_size must be a multiple of 16 in 16..1024: got {size}")
    tiling(key.shape[-2] == size, f"block_size must be that of the cache, {key.shape[-2]}: got {size}")
    tiling(table.dtype == torch.int32, f"block_table must be int32: got {table.dtype}")
    tiling(table.dim() == 2, f"block_table must have 2 axes: got {table.dim()}")
    rows, columns = table.shape
    tiling(columns > 0, f"block_table must have no empty axis: got {list(table.shape)}")
    tiling(rows == fia.requests(), f"block_table must have a row for each of {fia.requests()} requests: got {rows}")
    need = -(-max(fia.actual_seq_lengths_kv) // size)
    tiling(columns >= need, f"block_table must have at least {need} columns: got {columns}")


def _check_mask(fia: Fia) -> None:
    mode, mask = fia.sparse_mode, fia.atten_mask
    tiling(mode in (0, 3, 4, 9), f"sparse_mode must be 0, 3, 4 or 9 for D = 512: got {mode}")
    require(mode in (0, 3), f"sparse_mode: only 0 and 3 are emulated: got {mode}")
    if mask is None:
        tiling(mode == 0, f"atten_mask is needed for sparse_mode {mode}")
        return
    kinds = (torch.bool, torch.int8, torch.uint8)
    tiling(mask.dtype in kinds, f"atten_mask must be bool, int8 or uint8: got {mask.dtype}")
    if mode == 3:
        shape = [size for size in mask.shape[:-2] if size != 1] + list(mask.shape[-2:])
        tiling(shape == [MASK, MASK], f"atten_mask must be [2048, 2048] for sparse_mode 3: got {list(mask.shape)}")
    else:
        _check_explicit(fia, mask)


def _check_explicit(fia: Fia, mask: torch.Tensor) -> None:
    """[1 or B, >= S, >= the keys of the fullest table], with an axis for heads or without."""
    require(not fia.packed, "atten_mask: with sparse_mode 0 in TND, only its absence is emulated")
    tiling(mask.dim() in (3, 4), f"atten_mask must have 3 or 4 axes where there is rope: got {mask.dim()}")
    batch = fia.requests()
    fit = mask.shape[0] in (1, batch) and (mask.dim() == 3 or mask.shape[1] == 1)
    tiling(fit, f"atten_mask must be [1 or {batch}, ..]: got {list(mask.shape)}")
    places = fia.rows(fia.query, fia.layout, fia.num_heads).shape[1]
    keys = max(end for _, end in fia.key_spans())
    if fia.block_table is not None:
        keys = -(-keys // fia.block_size) * fia.block_size
    fit = mask.shape[-2] >= places and mask.shape[-1] >= keys
    tiling(fit, f"atten_mask must cover {places} queries and {keys} keys: got {list(mask.shape)}")


def _rises(numbers: list[int]) -> bool:
    return all(a <= b for a, b in pairwise([0, *numbers]))
