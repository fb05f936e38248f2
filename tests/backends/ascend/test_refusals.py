"""What our checks refuse before an operator is called; what the operators refuse is in `refusals`."""

import pytest
import torch

from mla_fx import backends
from mla_fx.backends import ascend
from mla_fx.backends.ascend.calls import release as calls_release
from mla_fx.backends.ascend.calls.projection import fits
from mla_fx.effects import InputError, ops
from tests.backends.ascend.conftest import refused
from tests.backends.ascend.legal import at, make

pytestmark = pytest.mark.usefixtures("emulator")


@pytest.mark.parametrize(
    ("heads", "inner", "features"),
    [
        *((16, 512, 128), (127, 512, 128), (128, 512, 128), (4, 24, 16), (4, 16, 24), (1, 16, 16), (4096, 16, 16)),
        *((4, 128, 192), (4, 192, 128), (3, 5, 7), (65535, 1, 1), (65536, 1, 1), (1, 1, 65535), (1, 1, 65536)),
        *((511, 128, 128), (512, 128, 128), (2, 65536, 1), (0, 16, 16), (1, 0, 16), (1, 16, 0)),
    ],
)
def test_our_guard_is_the_operators_own(release, heads, inner, features):
    """`fits` says yes exactly where the operator of that release does."""
    given = {"input": at(3, heads, inner), "weight": at(heads, inner, features)}
    if fits(heads, inner, features, calls_release.cann()):
        assert make("product", given).shape == (3, heads, features)
    else:
        with pytest.raises(RuntimeError, match=r"must be below 65536|must be multiples of|must not be empty"):
            make("product", given)


def test_the_release_is_the_one_that_the_wheel_read(monkeypatch):
    versions = ["9.1.0"]
    monkeypatch.setattr(torch.npu.utils, "get_cann_version", versions.pop)
    calls_release._told.cache_clear()
    assert calls_release.cann() == calls_release.cann() == (9, 1)  # asked once
    versions.append("8.5.0")
    calls_release._told.cache_clear()
    assert calls_release.cann() == (8, 5)
    calls_release._told.cache_clear()


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
    ("heads", "latent", "dtype", "message"),
    [
        (1, 512, torch.float64, "q: on ascend must be bf16, fp16 or fp32: got fp64"),
        (129, 512, torch.bfloat16, "heads: attention on ascend takes 1 to 128: got 129"),
        (1, 256, torch.bfloat16, "L: attention on ascend in bf16 needs 512 (other sizes run in fp32): got 256"),
    ],
)
def test_expanded_attention_refuses(heads, latent, dtype, message):
    sizes = [(1, heads * 192), (1, heads, 64), (1, latent), (1, 64), (heads, 128, latent), (heads, latent, 128)]
    why = refused(ops.ExpandedAttention(0.1), *(torch.zeros(size, dtype=dtype) for size in sizes), (1,))
    assert why == f"expanded_attention: {message}"


def test_combine_refuses():
    recv, recv_lse = torch.zeros(2, 1, 1, 8, dtype=torch.float64), torch.zeros(2, 1, 1, dtype=torch.float64)
    why = refused(ops.Combine(), recv, recv_lse, recv[0], recv_lse[0])
    assert why == "combine: recv: on ascend must be bf16, fp16 or fp32: got fp64"


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
    seen = {ops.HistoryAttention, ops.CurrentAttention, ops.ExpandedAttention, ops.Combine, ops.WriteRows}
    elsewhere = {ops.PermuteTokens, ops.GroupedLinear, ops.UnpermuteTokens, ops.QuantLinear, ops.QuantGroupedLinear}
    assert set(ascend.TABLE.takes) & set(ops.ALL) == seen | elsewhere


def test_the_seed_is_the_emulators():
    with pytest.raises(InputError, match=r"adversary: it plays all ranks on the host: got seed 3 .* on npu"):
        backends.get("ascend", adversary=3)
