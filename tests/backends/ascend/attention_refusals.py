"""What attention is refused for; see `refusals`."""

from collections.abc import Mapping
from typing import Any, Final

from tests.backends.ascend.legal import at, fp16, fp32, int8, int32, int64
from tests.backends.ascend.refusals import Row, row

_FLAT = {"block_table": None, "block_size": 0, "key": at(4, 1, 512), "key_rope": at(4, 1, 64)}  # keys without paging
_BATCHED = {"block_table": None, "block_size": 0, "key": at(2, 1, 9, 512), "key_rope": at(2, 1, 9, 64)}


def _without(base: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    return dict(base) | changed


def _prompt(**changed: Any) -> dict[str, Any]:
    """A prompt of expanded heads, 4 tokens."""
    heads = {"query": at(4, 16, 128), "key": at(4, 16, 128), "value": at(4, 16, 128), "key_rope": at(4, 16, 64)}
    return {**_FLAT, **heads, "num_key_value_heads": 16} | changed


ATTENTION: Final = (
    row("fia", "input_layout: only BSH, .* are emulated: got NTD", input_layout="NTD"),
    row("fia", "query must be float16 or bfloat16: got torch.float32", query=at(4, 16, 512, dtype=fp32)),
    row("fia", "num_heads must be one of .* got 12", query=at(4, 12, 512), query_rope=at(4, 12, 64), num_heads=12),
    row("fia_out", r"query must have 3 axes in TND: got \[4, 16, 1, 512\]", query=at(4, 16, 1, 512)),
    row(
        "fia_bnsd",
        r"query must have 16 \* 512 features: got 4096",
        input_layout="BSH",
        query=at(2, 1, 4096),
        query_rope=at(2, 1, 1024),
    ),
    row("fia", "query: only D = 512 and D = 128 are emulated: got 256", query=at(4, 16, 256)),
    row("fia", "query: D = 128 is emulated in TND without paging: got TND", query=at(4, 16, 128)),
    row("fia", "num_key_value_heads: only N = 16 is emulated for D = 128: got 2", **_prompt(num_key_value_heads=2)),
    row("fia", "sparse_mode: only 0 and 3 are emulated for D = 128: got 4", **_prompt(sparse_mode=4)),
    row("fia", r"key must have 16 heads for D = 128: got \[4, 1, 128\]", **_prompt(key=at(4, 1, 128))),
    row("fia", r"value must have the shape of key, .*: got \[4, 16, 64\]", **_prompt(value=at(4, 16, 64))),
    row("fia", r"key_rope must be \[4, 16, 64\]: got \[4, 64\]", **_prompt(key_rope=at(4, 64))),
    row("fia", "query_rope and key_rope: only D = 128 with both", **_prompt(query_rope=None)),
    row("fia", "pse_shift must be absent for D = 128", **_prompt(pse_shift=at(1, 16, 1, 1))),
    row("fia", "num_heads must be N = 16: got 8", num_heads=8),
    row("fia", "num_key_value_heads must be 1 for D = 512: got 0", num_key_value_heads=0),
    row("fia", "pse_shift must be absent for D = 512", pse_shift=at(1, 16, 1, 1)),
    row("fia_v2", "learnable_sink must be absent for D = 512", learnable_sink=at(16, dtype=fp32)),
    row("fia_v2", "num_query_heads must be N = 16: got 8", num_query_heads=8),
    row("fia", "key must have the dtype of query, torch.bfloat16: got .*16", key=at(8, 1, 128, 512, dtype=fp16)),
    row("fia", "key must have D = 512: got 256", key=at(8, 1, 128, 256), value=at(8, 1, 128, 512)),
    row("fia", "query_rope and key_rope are needed for D = 512", query_rope=None),
    row("fia", r"query_rope must be \[4, 16, 64\]: got \[4, 16, 32\]", query_rope=at(4, 16, 32)),
    row("fia", r"key_rope must be \[8, 1, 128, 64\]", key_rope=at(8, 1, 64, 64)),
    row("fia", r"key_rope must be torch.bfloat16: got torch.float16", key_rope=at(8, 1, 128, 64, dtype=fp16)),
    row("fia", "inner_precise must be 0 to 3: got 4", inner_precise=4),
    row("fia_out", r"out must be \[4, 16, 512\]: got \[4, 16, 256\]", out=at(4, 16, 256)),
    row("fia_out", "out must be torch.bfloat16: got torch.float16", out=at(4, 16, 512, dtype=fp16)),
    row("fia_out", "softmax_lse must be float32: got torch.bfloat16", softmax_lse=at(4, 16, 1)),
    row("fia_out", r"softmax_lse must be \[4, 16, 1\]: got \[4, 16\]", softmax_lse=at(4, 16, dtype=fp32)),
    row("fia_bnsd", r"actual_seq_lengths must be in 0\.\.S = 1: got \[2, 1\]", actual_seq_lengths=[2, 1]),
    row("fia", "actual_seq_lengths is needed for TND", actual_seq_lengths=None),
    row("fia", "actual_seq_lengths must not fall, for TND it is cumulative", actual_seq_lengths=[4, 2]),
    row("fia", "the last of actual_seq_lengths must be T = 4: got 3", actual_seq_lengths=[2, 3]),
    row("fia_v2", "the last of actual_seq_qlen must be T = 4: got 3", actual_seq_qlen=[2, 3]),
    row(
        "fia_out",
        "key must have 3 axes without paging in TND",
        **_without(_FLAT, key=at(4, 1, 1, 512), key_rope=at(4, 1, 1, 64)),
    ),
    row("fia", "key must have 1 head without paging", **_without(_FLAT, key=at(4, 2, 512), key_rope=at(4, 2, 64))),
    row("fia_bnsd", "actual_seq_lengths_kv is needed with paging", actual_seq_lengths_kv=None),
    row("fia", "actual_seq_lengths_kv is needed for TND", **_without(_FLAT, actual_seq_lengths_kv=None)),
    row("fia", "actual_seq_lengths_kv must be at least 0", actual_seq_lengths_kv=[300, -1]),
    row("fia", "actual_seq_lengths_kv must have 2 entries: got 1", actual_seq_lengths_kv=[300]),
    row(
        "fia_bnsd",
        "actual_seq_lengths_kv must have 1 or at least 3 entries: got 2",
        query=at(3, 16, 1, 512),
        query_rope=at(3, 16, 1, 64),
    ),
    row("fia", "must not fall, without paging it is cumulative", **_without(_FLAT, actual_seq_lengths_kv=[4, 2])),
    row("fia", "the last of actual_seq_lengths_kv must be 4: got 3", **_without(_FLAT, actual_seq_lengths_kv=[2, 3])),
    row(
        "fia_bnsd",
        "key must have 2 requests: got 3",
        **_without(_BATCHED, key=at(3, 1, 9, 512), key_rope=at(3, 1, 9, 64)),
    ),
    row("fia_bnsd", "actual_seq_lengths_kv must be at most 9", **_without(_BATCHED, actual_seq_lengths_kv=[9, 10])),
    row(
        "fia",
        r"a paged key of 5 axes \(NZ\) is not emulated",
        key=at(8, 1, 1, 128, 512),
        key_rope=at(8, 1, 1, 128, 64),
    ),
    row("fia_out", "a paged key must have 3 to 5 axes: got 2", key=at(128, 512), key_rope=at(128, 64)),
    row("fia", r"a paged key must be \[blocks, 1, size, 512\]", key=at(8, 2, 128, 512), key_rope=at(8, 2, 128, 64)),
    row("fia", r"block_size must be a multiple of 16 in 16\.\.1024: got 100", block_size=100),
    row("fia", "block_size must be that of the cache, 128: got 64", block_size=64),
    row("fia", "block_table must be int32: got torch.int64", block_table=at(2, 4, dtype=int64)),
    row("fia", "block_table must have 2 axes: got 1", block_table=at(4, dtype=int32)),
    row("fia", "block_table must have no empty axis", block_table=at(2, 0, dtype=int32)),
    row("fia", "block_table must have a row for each of 2 requests: got 3", block_table=at(3, 4, dtype=int32)),
    row("fia", "block_table must have at least 5 columns: got 4", actual_seq_lengths_kv=[513, 0]),
    row("fia", "sparse_mode must be 0, 3, 4 or 9 for D = 512: got 1", sparse_mode=1),
    row("fia", "sparse_mode: only 0 and 3 are emulated: got 4", sparse_mode=4),
    row("fia", "atten_mask is needed for sparse_mode 3", sparse_mode=3),
    row("fia", "atten_mask must be bool, int8 or uint8: got .*16", sparse_mode=3, atten_mask=at(2048, 2048)),
    row("fia", r"atten_mask must be \[2048, 2048\]", sparse_mode=3, atten_mask=at(512, 512, dtype=int8)),
    row("fia", "with sparse_mode 0 in TND, only its absence", atten_mask=at(2, 2, 512, dtype=int8)),
    row("fia_bnsd", "atten_mask must have 3 or 4 axes where there is rope: got 2", atten_mask=at(1, 512, dtype=int8)),
    row("fia_bnsd", r"atten_mask must be \[1 or 2, \.\.\]", atten_mask=at(3, 1, 512, dtype=int8)),
    row("fia_bnsd", "atten_mask must cover 1 queries and 384 keys", atten_mask=at(2, 1, 300, dtype=int8)),
)

#: By the module whose refusals they utter.
TABLE: Final[Mapping[str, tuple[Row, ...]]] = {"attention_checks": ATTENTION}
