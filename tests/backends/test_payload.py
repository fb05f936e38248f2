"""The exchange payload: bits in, the same bits out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_fx.backends.common.payload import pack, unpack
from tests.oracles import lse_lanes

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def bits(tensor):
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_half_first(dtype):
    lse = torch.tensor([[0x44790002]], dtype=torch.int32).view(torch.float32)
    packed = pack(torch.zeros(1, 1, 4, dtype=dtype), lse, ranks=1)
    assert bits(packed)[0].tolist() == [0, 0, 0, 0, 0x0002, 0x4479]


@each_dtype
@pytest.mark.parametrize(("ranks", "tokens", "own"), [(1, 1, 1), (1, 3, 2), (2, 1, 1), (4, 3, 2), (2, 0, 3), (3, 2, 2)])
@pytest.mark.parametrize("latent", [1, 2, 7, 64, 513])
def test_layout(dtype, ranks, tokens, own, latent):
    """Outputs in one piece, a lane left out where the LSEs would begin at half of one, then the LSEs."""
    out = torch.arange(tokens * ranks * own * latent).view(tokens, ranks * own, latent).remainder(251).to(dtype)
    lse = torch.arange(tokens * ranks * own).view(tokens, ranks * own).to(wide(dtype)) * 1234.567 + 65504
    packed = pack(out, lse, ranks=ranks)
    lanes, rows = lse_lanes(lse, dtype), tokens * own
    start = rows * latent + (rows * latent) % lanes.shape[-1]
    assert packed.dtype == dtype and packed.is_contiguous()
    assert packed.shape == (ranks, start + rows * lanes.shape[-1])
    got, got_lse = unpack(packed, (tokens, own, latent))
    assert got.shape == (ranks, tokens, own, latent) and got_lse.shape == (ranks, tokens, own)
    for r in range(ranks):
        heads = slice(r * own, (r + 1) * own)
        assert torch.equal(packed[r, : rows * latent], out[:, heads].flatten())
        assert torch.equal(bits(packed)[r, start:], lanes[:, heads].flatten())
        assert torch.equal(got[r], out[:, heads]) and torch.equal(got_lse[r], lse[:, heads])
        assert got[r].is_contiguous() and got_lse[r].is_contiguous()
    if tokens:  # read where it has arrived
        assert {part.untyped_storage().data_ptr() for part in (got, got_lse)} == {packed.untyped_storage().data_ptr()}


@each_dtype
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_lse_comes_back(dtype, data):
    width = 64 if dtype == torch.float64 else 32
    kind = torch.int64 if width == 64 else torch.int32
    patterns = data.draw(st.lists(st.integers(-(2 ** (width - 1)), 2 ** (width - 1) - 1), min_size=1, max_size=6))
    lse = torch.tensor([patterns], dtype=kind).view(wide(dtype))
    packed = pack(torch.zeros(1, len(patterns), 3, dtype=dtype), lse, ranks=1)
    _, got = unpack(packed, (1, len(patterns), 3))
    assert got[0, 0].view(kind).tolist() == patterns


@each_dtype
def test_operands_with_gaps(dtype):
    out = torch.randn(3, 8, 10).to(dtype)[:, ::2, ::2].transpose(0, 1).contiguous().transpose(0, 1)
    lse = torch.randn(4, 6).to(wide(dtype))[:, ::2].T
    assert torch.equal(bits(pack(out, lse, ranks=2)), bits(pack(out.contiguous(), lse.contiguous(), ranks=2)))
