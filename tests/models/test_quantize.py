"""Weights in 8 bits, held against their definitions element by element."""

import math

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from mla_fx.models import Checkpoint, small_config, write_checkpoint
from mla_fx.models.quantize import dequantize_fp8, quantize_fp8, quantize_int8, scale_shape
from mla_fx.models.weights import expected

#: The 254 bytes of e4m3 that are numbers: 0x7f and 0xff are NaN, and there is no infinity.
FINITE = [byte for byte in range(256) if byte & 0x7F != 0x7F]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(130, 257), (576, 100), (128, 128), (1, 1), (300, 5)]


def e4m3(byte: int) -> float:
    """A sign, four bits of exponent with bias 7, three of fraction; exponent 0 is subnormal."""
    sign, exponent, fraction = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (2.0**-6 * fraction / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + fraction / 8))


def weight_and_scale(shape: tuple[int, int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bytes, with every finite one where there is room, and factors that no rounding leaves alone."""
    noise = np.random.default_rng(seed)
    count = math.prod(shape)
    codes = np.resize(np.array(FINITE, np.uint8), count)
    noise.shuffle(codes)
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    return codes.reshape(shape), noise.uniform(0.001, 0.1, blocks).astype(np.float32)


def defined(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """w[r, c] = float32(w8[r, c]) * scale[r // 128, c // 128], in float32, one element after the other."""
    out = np.empty(codes.shape, np.float32)
    for r, c in np.ndindex(*codes.shape):
        out[r, c] = np.float32(e4m3(int(codes[r, c]))) * scale[r // 128, c // 128]
    return out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def to_fp8(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def test_factors_are_one_for_each_block_edges_included():
    assert scale_shape((7168, 7168)) == (56, 56)
    assert scale_shape((576, 7168)) == (5, 56)
    assert scale_shape((129, 128)) == (2, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantised_weights_are_the_definition_bit_for_bit(shape):
    codes, scale = weight_and_scale(shape)
    if math.prod(shape) > 1000:
        assert set(codes.ravel()) == set(FINITE)
    right = torch.from_numpy(defined(codes, scale))
    for dtype in DTYPES:
        found = dequantize_fp8(to_fp8(codes), torch.from_numpy(scale), dtype=dtype)
        assert found.dtype == dtype and torch.equal(bits(found), bits(right.to(dtype)))


def test_the_product_is_rounded_once():
    """1.875 * 1.003907 = 1.882326 is nearest to 1.8828125; of the factor in bf16, 1.0078125, it would be 1.890625."""
    codes = np.array([[next(byte for byte in FINITE if e4m3(byte) == 1.875)]], np.uint8)
    scale = torch.tensor([[1 + 2**-8 + 2**-20]])
    assert dequantize_fp8(to_fp8(codes), scale, dtype=torch.bfloat16).item() == 1.8828125
    assert (to_fp8(codes).bfloat16() * scale.bfloat16()).item() == 1.890625


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A checkpoint whose projections have partial blocks and every byte: per name, what the definition says."""
    directory = tmp_path_factory.mktemp("fp8")
    base = small_config()
    attention = evolve(base.attention, hidden_size=257, q_lora_rank=130, kv_lora_rank=100, qk_nope_head_dim=20)
    config = evolve(base, attention=attention, num_hidden_layers=1, moe=None, num_nextn_predict_layers=0, storage="fp8")
    write_checkpoint(directory, config)
    tensors = load_file(directory / "model.safetensors")
    right = {}
    for name in ("q_a_proj", "kv_b_proj", "o_proj"):
        full = f"model.layers.0.self_attn.{name}.weight"
        codes, scale = weight_and_scale(expected(config)[full].shape, seed=len(name))
        tensors[full], tensors[f"{full}_scale_inv"] = to_fp8(codes), torch.from_numpy(scale)
        right[full] = torch.from_numpy(defined(codes, scale))
    save_file(tensors, directory / "model.safetensors")
    return Checkpoint.open(directory), right


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (None, None),
        (slice(0, 128), None),
        (slice(5, 130), None),
        (slice(127, 129), slice(127, 129)),
        (slice(129, 130), slice(0, 100)),
        (None, slice(3, 99)),
        (None, slice(90, 257)),
        (slice(100, 130), slice(60, 257)),
    ],
    ids=str,
)
def test_slices_may_start_inside_a_block(rows, columns, dtype, stored):
    checkpoint, right = stored
    for name, whole in right.items():
        found = checkpoint.read(name, dtype=dtype, rows=rows, columns=columns)
        part = whole[rows or slice(None), columns or slice(None)].to(dtype)
        assert found.is_contiguous() and found.dtype == dtype
        assert torch.equal(bits(found), bits(part)), name


@pytest.mark.parametrize("piece", [1, 700, 5000, 1 << 30])
def test_pieces_of_any_size_give_the_same(piece, stored, monkeypatch):
    monkeypatch.setattr("mla_fx.models.formats.PIECE", piece)
    checkpoint, right = stored
    for name, whole in right.items():
        found = checkpoint.read(name, dtype=torch.bfloat16, rows=slice(7, 130), columns=slice(60, 99))
        assert torch.equal(found, whole[7:130, 60:99].bfloat16())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_of_a_weight(shape):
    """The largest of a block becomes 448; the error is at most half a step of e4m3, 1/16, or 2^-10 where subnormal."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    small, scale = quantize_fp8(weight)
    assert small.dtype == torch.float8_e4m3fn and small.shape == shape and small.is_contiguous()
    assert scale.dtype == torch.float32 and scale.shape == scale_shape(shape)
    for i, j in np.ndindex(*scale.shape):
        block = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
        assert small[block].float().abs().max() == 448
        assert scale[i, j] == weight[block].abs().max() / 448
        ratio = weight[block].double() / scale[i, j].double()
        error = (small[block].double() - ratio).abs()
        assert (error <= (ratio.abs() / 16).clamp_min(2.0**-10) * (1 + 1e-6)).all()


def test_fp8_of_zeros_is_zero():
    small, scale = quantize_fp8(torch.zeros(3, 130))
    assert (scale > 0).all() and not small.float().any()


# --- int8 ----------------------------------------------------------------------------------------


def half_to_even(value: float) -> int:
    low = math.floor(value)
    if value - low != 0.5:
        return math.floor(value + 0.5)
    return low if low % 2 == 0 else low + 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 9), (3, 4, 7), (1, 1)], ids=str)
def test_int8_is_its_definition(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    kept = weight.clone()
    small = quantize_int8(weight)
    assert torch.equal(weight, kept)
    assert small.weight.dtype == torch.int8 and small.weight.shape == shape
    assert small.scale.dtype == torch.float32 and small.scale.shape == shape[:-1]
    rows = zip(
        weight.double().reshape(-1, shape[-1]).tolist(),
        small.weight.reshape(-1, shape[-1]).tolist(),
        small.scale.reshape(-1).tolist(),
        strict=True,
    )
    for values, found, scale in rows:
        assert scale == np.float32(max(map(abs, values))) / np.float32(127)
        assert found == [half_to_even(float(np.float32(value) / np.float32(scale))) for value in values]


def test_halves_go_to_the_even_neighbour():
    row = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 125.5, 126.5]
    small = quantize_int8(torch.tensor([row, [2 * value for value in row]]))
    assert small.scale.tolist() == [1.0, 2.0]
    assert small.weight.tolist() == 2 * [[127, 0, 2, 2, 0, -2, -2, 126, 126]]


def test_rows_of_zeros():
    small = quantize_int8(torch.tensor([[0.0, -0.0], [0.0, 3.0]]))
    assert small.weight.tolist() == [[0, 0], [0, 127]]
    assert small.scale[0] == 0 and small.scale.isfinite().all()


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_the_error_is_at_most_half_a_step(size):
    weight = torch.randn(64, 300, generator=torch.Generator().manual_seed(2)) * size
    small = quantize_int8(weight)
    assert (small.weight.abs().amax(-1) == 127).all()
    error = (small.weight.double() * small.scale.double()[:, None] - weight.double()).abs()
    # The quotient is rounded to float32 before it is rounded to an integer: 127 * 2^-24 more.
    assert (error <= small.scale.double()[:, None] * (0.5 + 2**-16)).all()


def test_the_largest_number_of_a_subnormal_row_does_not_wrap_around():
    """190 times the smallest float32: the step, 190 / 127, is rounded to one of it."""
    row = torch.tensor([[190, 100, -190, 0]]).float() * 2.0**-149
    small = quantize_int8(row)
    assert small.weight.tolist() == [[127, 100, -127, 0]]
