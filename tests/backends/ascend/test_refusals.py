"""What the emulated operators refuse, as the real ones do, and what our checks refuse before them."""

from typing import Any

import pytest
import torch

from mla_fx import backends
from mla_fx.backends import ascend
from mla_fx.backends.ascend.calls.projection import fits
from mla_fx.effects import InputError, ops
from tests.backends.ascend.conftest import refused

pytestmark = pytest.mark.usefixtures("emulator")


def there(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="npu")


def attend(**changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A legal call of the attention operator, but for what is changed."""
    given: dict[str, Any] = {
        "query": there(4, 16, 512),
        "query_rope": there(4, 16, 64),
        "key": there(8, 1, 128, 512),
        "key_rope": there(8, 1, 128, 64),
        "num_heads": 16,
        "num_key_value_heads": 1,
        "input_layout": "TND",
        "scale": 0.1,
        "actual_seq_lengths": [2, 4],
        "actual_seq_lengths_kv": [300, 0],
        "block_table": torch.zeros(2, 4, dtype=torch.int32).npu(),
        "block_size": 128,
        "softmax_lse_flag": True,
    } | changed
    query, key = given.pop("query"), given.pop("key")
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.npu.npu_fused_infer_attention_score(query, key, key, **given)
    return found


def test_the_legal_call_and_its_empty_request():
    """0 and +inf where a request has no key on this rank."""
    out, lse = (part.cpu() for part in attend())
    assert out.shape == (4, 16, 512) and lse.shape == (4, 16, 1) and lse.dtype == torch.float32
    assert lse[:2].isfinite().all() and lse[2:].isposinf().all() and not out[2:].any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_heads": 8}, r"num_heads must be N = 16: got 8"),
        ({"query": (4, 12, 512), "query_rope": (4, 12, 64), "num_heads": 12}, r"num_heads must be one of .*: got 12"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads must be 1 .*: got 0"),
        ({"query_rope": None}, r"query_rope and key_rope are needed"),
        ({"query_rope": (4, 16, 32)}, r"query_rope must be \[4, 16, 64\]: got \[4, 16, 32\]"),
        ({"key_rope": (8, 1, 64, 64)}, r"key_rope must be \[8, 1, 128, 64\]"),
        ({"block_size": 100}, r"block_size must be a multiple of 16 in 16..1024: got 100"),
        ({"block_size": 64}, r"block_size must be that of the cache, 128: got 64"),
        ({"actual_seq_lengths": [2, 3]}, r"the last of actual_seq_lengths must be T = 4: got 3"),
        ({"actual_seq_lengths": [4, 2]}, r"actual_seq_lengths must not fall"),
        ({"actual_seq_lengths": None}, r"actual_seq_lengths is needed for TND"),
        ({"actual_seq_lengths_kv": [300]}, r"actual_seq_lengths_kv must have 2 entries: got 1"),
        ({"actual_seq_lengths_kv": [300, -1]}, r"actual_seq_lengths_kv must be at least 0"),
        ({"actual_seq_lengths_kv": [513, 0]}, r"block_table must have at least 5 columns: got 4"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32)}, r"block_table must have a row for each of 2 requests"),
        ({"block_table": torch.zeros(2, 4, dtype=torch.int64)}, r"block_table must be int32"),
        ({"sparse_mode": 1}, r"sparse_mode must be 0, 3, 4 or 9 for D = 512: got 1"),
        ({"sparse_mode": 3}, r"atten_mask is needed for sparse_mode 3"),
        ({"sparse_mode": 3, "atten_mask": torch.zeros(512, 512).bool()}, r"atten_mask must be \[2048, 2048\]"),
        ({"sparse_mode": 3, "atten_mask": torch.zeros(2048, 2048)}, r"atten_mask must be bool, int8 or uint8"),
        ({"block_table": None, "key": (4, 2, 512), "key_rope": (4, 2, 64)}, r"key must be \[T, 1, 512\] without"),
        ({"inner_precise": 4}, r"inner_precise must be 0 to 3: got 4"),
    ],
)
def test_attention_operator_refuses(changed, message):
    moved = {
        name: there(*value) if isinstance(value, tuple) else value.npu() if isinstance(value, torch.Tensor) else value
        for name, value in changed.items()
    }
    with pytest.raises(RuntimeError, match=message):
        attend(**moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_operator_takes_sixteen_bits_only(dtype):
    with pytest.raises(RuntimeError, match="query must be float16 or bfloat16"):
        attend(query=there(4, 16, 512, dtype=dtype))


def test_keys_without_paging_are_cumulative():
    keys = {"key": there(4, 1, 512), "key_rope": there(4, 1, 64), "block_table": None, "block_size": 0}
    attend(**keys, actual_seq_lengths_kv=[2, 4])
    with pytest.raises(RuntimeError, match="the last of actual_seq_lengths_kv must be 4: got 3"):
        attend(**keys, actual_seq_lengths_kv=[2, 3])
    with pytest.raises(RuntimeError, match="must not fall, without paging it is cumulative"):
        attend(**keys, actual_seq_lengths_kv=[4, 2])


def test_block_ids_are_not_checked_but_fault(emulator):
    table = torch.full((2, 4), 99, dtype=torch.int32).npu()
    attend(block_table=table)
    with pytest.raises(RuntimeError, match=r"block_table: ids must be in 0\.\.7: got \[99, 99, 99\]"):
        emulator.synchronize()


def transposed(heads: int, inner: int, features: int, **perms: tuple[int, ...]) -> torch.Tensor:
    x, weight = there(3, heads, inner), there(heads, inner, features)
    out: torch.Tensor = torch.ops.npu.npu_transpose_batchmatmul(x, weight, **{"perm_x1": (1, 0, 2), **perms})
    return out


@pytest.mark.parametrize(
    ("heads", "inner", "features"),
    [(16, 512, 128), (127, 512, 128), (128, 512, 128), (4, 24, 16), (4, 16, 24), (1, 16, 16), (4096, 16, 16)],
)
def test_our_guard_is_the_operators_own(heads, inner, features):
    """`fits` says yes exactly where the operator does."""
    if fits(heads, inner, features):
        assert transposed(heads, inner, features).shape == (3, heads, features)
    else:
        with pytest.raises(RuntimeError, match=r"K \* B must be below 65536|K and N must be multiples of 16"):
            transposed(heads, inner, features)


def test_merge_operator_refuses_seventeen_parts():
    lse, part = there(4, dtype=torch.float32), there(4, 8)
    torch.ops.npu.npu_attention_update([lse] * 16, [part] * 16, 0)
    with pytest.raises(RuntimeError, match="local_out must have 1 to 16 parts: got 17"):
        torch.ops.npu.npu_attention_update([lse] * 17, [part] * 17, 0)
    with pytest.raises(RuntimeError, match=r"head_dim must be a multiple of 8 in 8\.\.512: got 12"):
        torch.ops.npu.npu_attention_update([lse], [there(4, 12)], 0)


def test_merge_operator_gives_nan_where_nothing_was_seen():
    lse = torch.tensor([float("inf"), 0.0]).npu()
    out, _ = torch.ops.npu.npu_attention_update([lse, lse], [there(2, 8)] * 2, 0)
    assert out.cpu()[0].isnan().all() and not out.cpu()[1].any()


def test_cache_operator_refuses():
    rows, caches = [there(2, 1, 16), there(2, 1, 8)], [there(3, 4, 1, 16), there(3, 4, 1, 8)]
    slots = torch.tensor([0, 1]).npu()
    with pytest.raises(RuntimeError, match="cache_mode: only Norm is emulated: got PA_NZ"):
        torch.ops.npu.npu_scatter_pa_kv_cache(*rows, *caches, slots)
    with pytest.raises(RuntimeError, match="key_cache must be"):
        torch.ops.npu.npu_scatter_pa_kv_cache(*rows, caches[1], caches[1], slots, cache_mode="Norm")


# --- ours, before any call ----------------------------------------------------------


def history(heads=2, latent=512, rope=64, size=16, columns=1, dtype=torch.bfloat16):
    parts = [torch.zeros(1, heads, width, dtype=dtype) for width in (latent, rope)]
    caches = [torch.zeros(2, size, width, dtype=dtype) for width in (latent, rope)]
    return *parts, *caches, torch.zeros(1, columns, dtype=torch.int32), (1,), (0,)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"latent": 256}, "L: attention on ascend in bf16 needs 512 (other sizes run in fp32): got 256"),
        ({"rope": 32}, "R: attention on ascend in bf16 needs 64 (other sizes run in fp32): got 32"),
        ({"heads": 129}, "heads: attention on ascend takes 1 to 128: got 129"),
        ({"size": 24}, "block_size: attention on ascend needs a multiple of 16 in 16..1024: got 24"),
        ({"size": 1040}, "block_size: attention on ascend needs a multiple of 16 in 16..1024: got 1040"),
        ({"columns": 0}, "table_width: attention on ascend needs at least 1 column of block_table: got 0"),
        ({"dtype": torch.float64}, "q_latent: on ascend must be bf16, fp16 or fp32: got fp64"),
    ],
)
def test_history_attention_refuses(emulator, changed, message):
    operands = history(**changed)
    with emulator.tracing() as trace:
        assert refused(ops.HistoryAttention(0.1), *operands) == f"history_attention: {message}"
    assert not trace


def test_current_attention_refuses():
    q_latent, q_rope, *_ = history(heads=129)
    keys = [torch.zeros(1, width, dtype=torch.bfloat16) for width in (512, 64)]
    why = refused(ops.CurrentAttention(0.1), q_latent, q_rope, *keys, (1,))
    assert why == "current_attention: heads: attention on ascend takes 1 to 128: got 129"


@pytest.mark.parametrize(
    ("ranks", "latent", "dtype", "message"),
    [
        (16, 8, "float32", "ranks: combine on ascend merges at most 15 and the local part: got 16"),
        (2, 12, "float32", "L: combine on ascend needs a multiple of 8 in 8..512: got 12"),
        (2, 520, "float32", "L: combine on ascend needs a multiple of 8 in 8..512: got 520"),
        (2, 8, "float64", "recv: on ascend must be bf16, fp16 or fp32: got fp64"),
    ],
)
def test_combine_refuses(ranks, latent, dtype, message):
    shape = {"dtype": getattr(torch, dtype)}
    recv, recv_lse = torch.zeros(ranks, 1, 1, latent, **shape), torch.zeros(ranks, 1, 1, **shape)
    assert refused(ops.Combine(), recv, recv_lse, recv[0], recv_lse[0]) == f"combine: {message}"


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 4, 8), torch.float64, "cache: on ascend must be bf16, fp16 or fp32: got fp64"),
        ((0, 4, 8), torch.float32, "cache: on ascend must have a block, a row and a feature: got fp32[0, 4, 8]"),
    ],
)
def test_write_rows_refuses(shape, dtype, message):
    rows, slots = torch.zeros(1, shape[2], dtype=dtype), torch.tensor([0])
    assert refused(ops.WriteRows(), torch.zeros(shape, dtype=dtype), rows, slots) == f"write_rows: {message}"


def test_every_refusal_has_been_seen():
    """By a test here, of the experts' or of 8 bits; by its own where an op is this backend's."""
    seen = {ops.HistoryAttention, ops.CurrentAttention, ops.Combine, ops.WriteRows}
    elsewhere = {ops.PermuteTokens, ops.GroupedLinear, ops.UnpermuteTokens, ops.QuantLinear, ops.QuantGroupedLinear}
    assert set(ascend.TABLE.takes) & set(ops.ALL) == seen | elsewhere


def test_the_seed_is_the_emulators():
    with pytest.raises(InputError, match=r"adversary: it plays all ranks on the host: got seed 3 .* on npu"):
        backends.get("ascend", adversary=3)
