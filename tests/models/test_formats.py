"""Weights in 8 bits, each format against its own dequantisation from the definition, and formats that are not read.

What a checkpoint of floats holds is replaced, matrix by matrix, by random 8-bit numbers and what belongs beside them;
the right answers are made here, in float64, element by element.
"""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from mla_fx import backends
from mla_fx.effects import InputError
from mla_fx.models import Checkpoint, CheckpointError, Loader, load_config, write_checkpoint
from mla_fx.models.config_file import parse_config
from mla_fx.models.formats import LOOKED_AT
from mla_fx.parameters import Quantized
from tests.models.small_weights import (
    O_PROJ,
    TINY,
    Tensors,
    channels,
    described,
    is_projection,
    kind_of,
    logits,
    rewritten,
    write_modelslim,
)
from tests.models.test_config import GIVEN
from tests.models.test_families import INT4
from tests.models.test_quantize import e4m3


def same(checkpoint: Checkpoint, right: Tensors, dtype: torch.dtype = torch.float32) -> None:
    for name, whole in right.items():
        found = checkpoint.read(name, dtype=dtype)
        # One product in float32, rounded once more where the dtype is smaller: nothing beyond that.
        assert torch.equal(found, whole.to(torch.float32).to(dtype)), name
        rows, columns = slice(3, whole.shape[0] - 2), slice(5, whole.shape[1])
        part = checkpoint.read(name, dtype=dtype, rows=rows, columns=columns)
        assert torch.equal(part, found[rows, columns]), name


# --- FP8 -----------------------------------------------------------------------------------------


def e8m0(byte: int) -> float:
    """Eight bits of exponent with bias 127, and nothing else."""
    return 2.0 ** (byte - 127)


@pytest.mark.parametrize("scales", ["fp32", "bf16", "ue8m0"])
def test_fp8_blocks_with_factors_of_any_kind(scales, tmp_path):
    """w[r, c] = w8[r, c] * factor[r // 128, c // 128], the bytes read by the definition of each format."""
    write_checkpoint(tmp_path, evolve(TINY, storage="fp8"))
    tensors, right = load_file(tmp_path / "model.safetensors"), {}
    for seed, name in enumerate([name for name in tensors if is_projection(name)]):
        noise = np.random.default_rng(seed)
        codes = noise.integers(0, 127, tensors[name].shape, np.uint8)
        shape = tensors[f"{name}_scale_inv"].shape
        if scales == "ue8m0":
            bytes_ = noise.integers(110, 140, tuple(shape), np.uint8)
            factors = np.vectorize(e8m0, otypes=[float])(bytes_)
            stored = torch.from_numpy(bytes_).view(torch.float8_e8m0fnu)
        else:
            stored = torch.from_numpy(noise.uniform(0.001, 0.1, tuple(shape)).astype(np.float32))
            stored = stored.bfloat16() if scales == "bf16" else stored
            factors = stored.double().numpy()
        spread = factors.repeat(128, 0).repeat(128, 1)[: codes.shape[0], : codes.shape[1]]
        right[name] = torch.from_numpy(np.vectorize(e4m3, otypes=[float])(codes) * spread)
        tensors[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = stored
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    same(checkpoint, right)
    same(checkpoint, right, torch.bfloat16)


# --- compressed-tensors --------------------------------------------------------------------------


def test_int8_channels_of_compressed_tensors(tmp_path):
    write_checkpoint(tmp_path, TINY)
    _, right = rewritten(tmp_path, channels)
    fields = {**json.loads((tmp_path / "config.json").read_text()), **evolve(TINY, storage="int8").to_json()}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config.storage == "int8"
    same(checkpoint, right)
    same(checkpoint, right, torch.float16)


def test_int8_that_we_write_is_found_again(tmp_path):
    write_checkpoint(tmp_path / "int8", evolve(TINY, storage="int8"))
    write_checkpoint(tmp_path / "wide", TINY)
    small, wide = (Checkpoint.open(tmp_path / name) for name in ("int8", "wide"))
    for name in (O_PROJ, "model.layers.1.mlp.experts.2.up_proj.weight"):
        a, b = (each.read(name, dtype=torch.float32) for each in (small, wide))
        assert ((a - b).abs() <= 0.5001 * b.abs().amax(1, keepdim=True) / 127).all()


SCHEME = evolve(TINY, storage="int8").to_json()["quantization_config"]


def scheme(part: str, **changes: Any) -> dict[str, Any]:
    group = SCHEME["config_groups"]["group_0"]
    return {**SCHEME, "config_groups": {"group_0": {**group, part: {**group[part], **changes}}}}


OTHER_INT8 = "compressed-tensors int-quantized of anything but W8A8 by channel and token"


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8 without blocks"),
        (INT4, "compressed-tensors pack-quantized"),
        ({**SCHEME, "format": "float-quantized"}, "compressed-tensors float-quantized"),
        (scheme("weights", num_bits=4), OTHER_INT8),
        (scheme("weights", symmetric=False), OTHER_INT8),
        (scheme("weights", strategy="group"), OTHER_INT8),
        (scheme("input_activations", strategy="tensor", dynamic=False), OTHER_INT8),
        ({**SCHEME, "kv_cache_scheme": {"num_bits": 8}}, OTHER_INT8),
        ({**SCHEME, "config_groups": {}}, OTHER_INT8),
        ({**SCHEME, "config_groups": {"group_0": {"weights": None}}}, OTHER_INT8),
    ],
)
def test_other_formats_are_refused_by_name(quantization, name, tmp_path):
    """The configuration is read, and says what it is; the weights are not."""
    write_checkpoint(tmp_path, TINY)
    fields = {**TINY.to_json(), "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_config(tmp_path).storage == name
    assert parse_config(load_config(tmp_path).to_json()).storage == name
    with pytest.raises(CheckpointError, match=rf"weights must be bf16, .*: got the format {name}$"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("ending", "name"),
    [("qweight", "gptq or awq"), ("weight_packed", "compressed-tensors pack-quantized"), ("weight_scale_2", "NVFP4")],
)
def test_formats_that_only_their_tensors_tell(ending, name, tmp_path):
    write_checkpoint(tmp_path, TINY)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{O_PROJ.removesuffix('weight')}{ending}"] = tensors.pop(O_PROJ)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"got the format {name}$"):
        Checkpoint.open(tmp_path)


def test_int8_that_nothing_tells_of(tmp_path):
    write_checkpoint(tmp_path, TINY)
    rewritten(tmp_path, channels)
    with pytest.raises(CheckpointError, match=r"got I8, and nothing says that it is stored in 8 bits"):
        Checkpoint.open(tmp_path)


# --- ModelSlim -----------------------------------------------------------------------------------


@pytest.fixture
def slim(tmp_path):
    """A checkpoint as ModelSlim writes it, and what the definition says of its projections."""
    return tmp_path, *write_modelslim(tmp_path)


def test_modelslim_is_its_definition(slim):
    directory, tensors, right = slim
    assert {kind_of(name) for name in right} == {"FLOAT", "W8A8", "W8A8_DYNAMIC"}
    checkpoint = Checkpoint.open(directory)
    same(checkpoint, right)
    same(checkpoint, right, torch.bfloat16)
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(checkpoint.read(norm, dtype=torch.float32), tensors[norm])


def test_its_files_have_names_of_their_own(slim):
    directory, tensors, right = slim
    (directory / "model.safetensors").rename(directory / "quant_model_weight_w8a8.safetensors")
    same(Checkpoint.open(directory), right)
    names = sorted(tensors)
    (directory / "quant_model_weight_w8a8.safetensors").unlink()
    weight_map = {}
    for k in range(2):
        file = f"quant_model_weights-0000{k + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[k::2]}, directory / file)
        weight_map |= dict.fromkeys(names[k::2], file)
    index = directory / "quant_model_weights.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    same(Checkpoint.open(directory), right)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_int8_is_kept_as_it_is(slim, ranks):
    """Rows, columns and experts of a rank with the file's own steps, and not quantised anew."""
    directory, tensors, _ = slim
    checkpoint = Checkpoint.open(directory)
    made = [
        Loader(checkpoint=checkpoint, rank=rank, ranks=ranks, dtype=torch.bfloat16, quantization="w8a8").model()
        for rank in range(ranks)
    ]
    heads, own = 4 // ranks, 4 // ranks
    for rank, model in enumerate(made):
        attention, moe = model.layers[0].attention, model.layers[1].feed_forward
        q, scale = attention.query.q_b_proj
        rows = slice(rank * heads * 48, (rank + 1) * heads * 48)
        name = "model.layers.0.self_attn.q_b_proj.weight"
        assert torch.equal(q, tensors[name][rows]) and torch.equal(scale, tensors[f"{name}_scale"][rows, 0])
        o, scale = attention.o_proj
        assert torch.equal(o, tensors[O_PROJ][:, rank * heads * 40 : (rank + 1) * heads * 40])
        assert torch.equal(scale, tensors[f"{O_PROJ}_scale"][:, 0])
        for y in range(own):
            name = f"model.layers.1.mlp.experts.{rank * own + y}."
            up, down = f"{name}up_proj.weight", f"{name}down_proj.weight"
            assert torch.equal(moe.gate_up_proj.weight[y, 24:], tensors[up])
            assert torch.equal(moe.gate_up_proj.scale[y, 24:], tensors[f"{up}_scale"][:, 0])
            assert torch.equal(moe.down_proj.weight[y], tensors[down])
            assert torch.equal(moe.down_proj.scale[y], tensors[f"{down}_scale"][:, 0])
    kinds = {type(each) for each in (made[0].layers[0].attention.w_uk, made[0].layers[0].attention.kv_a_proj)}
    assert kinds == {torch.Tensor, Quantized}


def test_a_model_of_kept_int8_beside_the_one_multiplied_out(slim):
    """The same weights: what differs is that activations are quantised, by a 254th of the largest of each token."""
    directory, tensors, right = slim
    wide = {name: each for name, each in tensors.items() if name in right or "proj" not in name}
    (directory / "wide").mkdir()
    save_file(wide | {name: each.float() for name, each in right.items()}, directory / "wide" / "model.safetensors")
    (directory / "wide" / "config.json").write_text(json.dumps(TINY.to_json()))
    exact = logits(directory / "wide", backends.get("reference", ranks=2))
    assert torch.allclose(
        logits(directory, backends.get("reference", ranks=2)), exact, rtol=1e-6, atol=1e-6 * exact.abs().max()
    )
    kept = logits(directory, backends.get("cpu", ranks=2), "w8a8")
    deviation = (kept - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 1e-4 < deviation < 0.2
    assert torch.allclose(
        kept, logits(directory, backends.get("reference", ranks=2), "w8a8"), rtol=1e-3, atol=1e-3 * exact.abs().max()
    )


@pytest.mark.parametrize("name", [O_PROJ, "model.layers.1.mlp.experts.0.up_proj.weight"])
def test_offsets_are_refused(slim, name):
    directory, tensors, _ = slim
    tensors[f"{name}_offset"][1] = 1
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}_offset: only symmetric weights are read"):
        Checkpoint.open(directory).read(name, dtype=torch.float32)


def test_a_bias_folded_in_is_refused(slim):
    directory, tensors, _ = slim
    base = O_PROJ.removesuffix("weight")
    assert len(tensors[f"{base}quant_bias"]) > LOOKED_AT
    tensors[f"{base}quant_bias"] += 5
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{base}quant_bias: must undo input_offset and nothing else"):
        Checkpoint.open(directory).read(O_PROJ, dtype=torch.float32)


def test_what_belongs_beside_a_weight_must_be_there(slim):
    directory, tensors, _ = slim
    base = O_PROJ.removesuffix("weight")
    for name in ("input_scale", "input_offset", "quant_bias", "deq_scale", "weight_scale", "weight_offset"):
        short = {each: tensor for each, tensor in tensors.items() if each != base + name}
        save_file(short, directory / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"1 missing: {base}{name}"):
            Checkpoint.open(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({O_PROJ: "W4A8_DYNAMIC"}, rf"{O_PROJ}: must be FLOAT, W8A8 or W8A8_DYNAMIC: got 'W4A8_DYNAMIC'"),
        ({"kv_quant_type": "C8"}, r"kv_quant_type: attention and caches in 8 bits are not read: got 'C8'"),
        ({O_PROJ: "FLOAT"}, rf"{O_PROJ} \(must be BF16, F16, F32, F64, got I8"),
        (
            {"model.layers.0.self_attn.kv_b_proj.weight": "W8A8"},
            r"kv_b_proj.weight \(must be I8, got F32\)",
        ),
    ],
)
def test_descriptions_that_are_refused(changes, message, slim):
    directory, _, _ = slim
    described(directory, **changes)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(directory)


def test_a_description_that_is_missing_or_none(tmp_path):
    write_checkpoint(tmp_path, TINY)
    fields = {**TINY.to_json(), "quantization_config": {"quant_method": "ascend"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"quant_model_description.json: must be there .*: got nothing"):
        Checkpoint.open(tmp_path)
    for text, message in (("{", "must be JSON"), ("[]", "must be an object: got list")):
        (tmp_path / "quant_model_description.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(tmp_path)


def test_fields_of_a_quantised_checkpoint_change_nothing():
    """MindIE says in config.json what the description says."""
    plain = parse_config(GIVEN)
    assert parse_config({**GIVEN, "quantize": "w8a8_dynamic", "mla_quantize": "w8a8"}) == plain
    with pytest.raises(InputError, match=r"quantization_config: must be an object: got 8"):
        parse_config({**GIVEN, "quantization_config": 8})
    assert math.isclose(e8m0(127), 1.0)
