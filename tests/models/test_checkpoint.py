"""A checkpoint directory: verified as a whole, everything wrong told at once; what is written can be opened."""

import json

import pytest
import torch
from attrs import evolve
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from mla_fx import MlaConfig
from mla_fx.config import MoeConfig
from mla_fx.effects import InputError
from mla_fx.models import Checkpoint, CheckpointError, small_config, write_checkpoint
from mla_fx.models.weights import expected, prediction

TINY = evolve(
    small_config(),
    num_hidden_layers=2,
    num_nextn_predict_layers=0,
    vocab_size=16,
    intermediate_size=12,
    attention=MlaConfig(
        hidden_size=24,
        num_attention_heads=4,
        q_lora_rank=10,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
    ),
    moe=MoeConfig(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=7, n_shared_experts=2, n_group=2, topk_group=1
    ),
)
FP8 = evolve(TINY, storage="fp8")
MTP = evolve(TINY, num_nextn_predict_layers=2)
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture
def directory(tmp_path):
    write_checkpoint(tmp_path, TINY)
    return tmp_path


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def refused(directory) -> list[str]:
    """The lines of the error on opening, one for each kind of fault."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    first, *lines = str(caught.value).split("\n  ")
    assert first == f"{directory}: tensors must be those of config.json"
    return lines


def test_missing_unexpected_misshapen_and_ill_typed_are_told_at_once(directory):
    def change(tensors):
        for expert in range(4):
            del tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        del tensors["model.norm.weight"], tensors["lm_head.weight"]
        tensors["model.layers.0.self_attn.sinks"] = torch.zeros(2)
        tensors[O_PROJ] = torch.zeros(24, 19)
        tensors["model.layers.0.self_attn.kv_a_layernorm.weight"] = torch.ones(8, dtype=torch.int32)

    rewrite(directory, change)
    up = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in range(4)]
    assert refused(directory) == [
        f"6 missing: {', '.join(up)}, model.norm.weight, and 1 more",
        "1 unexpected: model.layers.0.self_attn.sinks",
        f"1 of another shape: {O_PROJ} (must be [24, 20], got [24, 19])",
        "1 of another dtype: model.layers.0.self_attn.kv_a_layernorm.weight (must be BF16, F16, F32, F64, got I32)",
    ]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (16, 24)),
        ("lm_head.weight", (16, 24)),
        ("model.norm.weight", (24,)),
        ("model.layers.0.input_layernorm.weight", (24,)),
        ("model.layers.0.post_attention_layernorm.weight", (24,)),
        ("model.layers.0.self_attn.q_a_proj.weight", (10, 24)),
        ("model.layers.0.self_attn.q_a_layernorm.weight", (10,)),
        ("model.layers.0.self_attn.q_b_proj.weight", (40, 10)),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (12, 24)),
        ("model.layers.0.self_attn.kv_a_layernorm.weight", (8,)),
        ("model.layers.0.self_attn.kv_b_proj.weight", (44, 8)),
        ("model.layers.0.self_attn.o_proj.weight", (24, 20)),
        ("model.layers.0.mlp.gate_proj.weight", (12, 24)),
        ("model.layers.0.mlp.up_proj.weight", (12, 24)),
        ("model.layers.0.mlp.down_proj.weight", (24, 12)),
        ("model.layers.1.mlp.gate.weight", (4, 24)),
        ("model.layers.1.mlp.gate.e_score_correction_bias", (4,)),
        ("model.layers.1.mlp.experts.3.gate_proj.weight", (7, 24)),
        ("model.layers.1.mlp.experts.3.up_proj.weight", (7, 24)),
        ("model.layers.1.mlp.experts.3.down_proj.weight", (24, 7)),
        ("model.layers.1.mlp.shared_experts.gate_proj.weight", (14, 24)),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", (14, 24)),
        ("model.layers.1.mlp.shared_experts.down_proj.weight", (24, 14)),
    ],
)
def test_names_and_shapes(name, shape):
    assert expected(TINY)[name].shape == shape


def test_every_tensor_is_asked_for():
    """Counted by hand: embedding, norm and head; a dense and a MoE layer with 4 experts and a shared one."""
    attention, norms, mlp = 7, 2, 3
    dense, moe = attention + norms + mlp, attention + norms + 2 + 4 * mlp + mlp
    assert len(expected(TINY)) == 3 + dense + moe
    assert len(expected(evolve(TINY, tie_word_embeddings=True))) == 2 + dense + moe
    assert len(expected(evolve(TINY, moe=None))) == 3 + 2 * dense
    plain = expected(evolve(TINY, attention=evolve(TINY.attention, q_lora_rank=None)))
    assert len(plain) == len(expected(TINY)) - 4
    assert plain["model.layers.1.self_attn.q_proj.weight"].shape == (40, 24)
    assert len(prediction(TINY, 2)) == 4 + moe
    assert prediction(TINY, 2)["model.layers.2.eh_proj.weight"].shape == (24, 48)
    v2 = evolve(TINY.moe, topk_method="greedy", scoring_func="softmax", norm_topk_prob=False)
    assert set(expected(TINY)) - set(expected(evolve(TINY, moe=v2))) == {
        "model.layers.1.mlp.gate.e_score_correction_bias"
    }


# --- what need not be there ----------------------------------------------------------------------


def test_prediction_layers_are_there_as_a_whole_or_not_at_all(tmp_path):
    write_checkpoint(tmp_path, MTP)
    assert Checkpoint.open(tmp_path).has_prediction
    second = {name: torch.zeros(weight.shape) for name, weight in prediction(MTP, 3).items()}
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in second])
    assert Checkpoint.open(tmp_path).has_prediction
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in prediction(MTP, 2)])
    assert not Checkpoint.open(tmp_path).has_prediction
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.2.enorm.weight": torch.ones(24)}))
    (line,) = refused(tmp_path)
    assert line.startswith(f"{len(second) - 1} missing: model.layers.2.hnorm.weight, model.layers.2.eh_proj.weight")
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.2.enorm.weight"))
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": torch.zeros(24, 48)}))
    assert refused(tmp_path) == ["1 unexpected: model.layers.4.eh_proj.weight"]


@pytest.mark.parametrize("given", [0, None])
def test_prediction_layers_that_are_not_counted_are_noted(given, tmp_path):
    """42 tensors of two of them; they are told of, and nothing of them is read."""
    write_checkpoint(tmp_path, MTP)
    fields = {**MTP.to_json(), "num_nextn_predict_layers": given}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    checkpoint = Checkpoint.open(tmp_path)
    count = len(prediction(MTP, 2)) + len(prediction(MTP, 3))
    assert checkpoint.notes == (
        f"{count} tensors of prediction layers (2, 3) are not read: config.json has no num_nextn_predict_layers",
    )
    assert not checkpoint.has_prediction and set(checkpoint.files) == set(expected(MTP))


def test_a_layer_too_many_is_no_prediction_layer(tmp_path):
    """A decoder layer that the configuration does not count: the configuration is another model's."""
    write_checkpoint(tmp_path, evolve(TINY, num_hidden_layers=3))
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_json()))
    (line,) = refused(tmp_path)
    layer = len(expected(evolve(TINY, num_hidden_layers=3))) - len(expected(TINY))
    assert line.startswith(f"{layer} unexpected: model.layers.2.")


def test_buffers_that_follow_from_the_configuration_are_noted(directory, caplog):
    """As files of Moonlight and Kimi have them; that the note is logged, too."""
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]
    rewrite(directory, lambda tensors: tensors.update({name: torch.ones(2) for name in names}))
    with caplog.at_level("WARNING", logger="mla_fx"):
        checkpoint = Checkpoint.open(directory)
    note = "2 buffers of rotary_emb are not read: they follow from config.json"
    assert checkpoint.notes == (note,) and not set(names) & set(checkpoint.files)
    assert [record.getMessage() for record in caplog.records] == [f"{directory}: {note}"]
    rewrite(directory, lambda tensors: tensors.update({"model.layers.0.self_attn.inv_freq": torch.ones(2)}))
    assert refused(directory) == ["1 unexpected: model.layers.0.self_attn.inv_freq"]


def test_nothing_is_noted_where_everything_is_read(directory):
    assert Checkpoint.open(directory).notes == ()


def test_a_prediction_layer_may_have_its_own_embedding_and_head(tmp_path):
    write_checkpoint(tmp_path, MTP)
    names = [f"model.layers.2.{name}.weight" for name in ("embed_tokens", "shared_head.head")]
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(16, 24) for name in names}))
    assert set(names) < set(Checkpoint.open(tmp_path).files)
    rewrite(tmp_path, lambda tensors: tensors.update({names[1]: torch.ones(16, 23)}))
    assert refused(tmp_path) == [f"1 of another shape: {names[1]} (must be [16, 24], got [16, 23])"]


def test_a_tied_head_may_be_there(tmp_path):
    write_checkpoint(tmp_path, evolve(TINY, tie_word_embeddings=True))
    assert "lm_head.weight" not in Checkpoint.open(tmp_path).files
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(16, 24)}))
    Checkpoint.open(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(17, 24)}))
    assert refused(tmp_path) == ["1 of another shape: lm_head.weight (must be [16, 24], got [17, 24])"]


def test_tensors_without_elements_say_nothing(tmp_path):
    """As transformers writes them for shared experts of width 0; none of them is read, whatever its name."""
    write_checkpoint(tmp_path, evolve(FP8, moe=evolve(FP8.moe, n_shared_experts=0)), dtype=torch.bfloat16)
    names = {
        "model.layers.1.mlp.shared_experts.gate_proj.weight": (0, 24),
        "model.layers.1.mlp.shared_experts.down_proj.weight": (24, 0),
        "model.layers.1.mlp.gate.weight_scale_inv": (0, 1),
    }
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(shape) for name, shape in names.items()}))
    checkpoint = Checkpoint.open(tmp_path)
    assert not set(names) & set(checkpoint.files)
    assert checkpoint.read("model.layers.1.mlp.gate.weight", dtype=torch.float32).shape == (4, 24)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(0, 24)}))
    assert refused(tmp_path) == ["1 of another shape: lm_head.weight (must be [16, 24], got [0, 24])"]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("generation", ["V2", "V3", "V3 without shared experts"])
def test_checkpoints_that_transformers_writes(generation, tmp_path):
    sizes = {
        "vocab_size": 16, "hidden_size": 24, "intermediate_size": 12, "moe_intermediate_size": 7,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
        "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_shared_experts": 2,
    }  # fmt: skip
    if generation == "V2":
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**sizes))
    else:
        shared = {} if generation == "V3" else {"n_shared_experts": 0}
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes | shared))
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config.moe.n_shared_experts == (0 if "without" in generation else 2)
    # num_nextn_predict_layers is 1 in transformers' V3, but it writes no such layer.
    assert not checkpoint.has_prediction
    head = checkpoint.read("lm_head.weight", dtype=torch.float32)
    assert torch.equal(head, model.lm_head.weight)


# --- FP8 -----------------------------------------------------------------------------------------


def test_projections_are_fp8_with_their_factors_beside_them(tmp_path):
    """As published: every projection of the layers, kv_a_proj_with_mqa too; not the gate, norms, tables, eh_proj."""
    write_checkpoint(tmp_path, evolve(MTP, storage="fp8"), dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    small = {name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    assert {name.split(".")[-2] for name in small} == {
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    attention, mlp = 5, 3
    assert len(small) == 4 * attention + mlp + 3 * (4 + 1) * mlp
    assert {name for name in tensors if name.endswith("_scale_inv")} == {f"{name}_scale_inv" for name in small}
    assert {str(tensors[f"{name}_scale_inv"].dtype) for name in small} == {"torch.float32"}
    assert "model.layers.2.eh_proj.weight" not in small
    Checkpoint.open(tmp_path)


def test_projections_of_an_fp8_model_may_be_wide(tmp_path):
    write_checkpoint(tmp_path, FP8)

    def change(tensors):
        tensors[O_PROJ] = torch.ones(24, 20, dtype=torch.bfloat16)
        del tensors[f"{O_PROJ}_scale_inv"]

    rewrite(tmp_path, change)
    assert torch.equal(Checkpoint.open(tmp_path).read(O_PROJ, dtype=torch.float32), torch.ones(24, 20))


def test_faults_of_fp8_are_told_at_once(tmp_path):
    write_checkpoint(tmp_path, FP8)
    layer = "model.layers.0."
    q_b, kv_b = f"{layer}self_attn.q_b_proj.weight", f"{layer}self_attn.kv_b_proj.weight"
    gate, norm = f"{layer}mlp.gate_proj.weight", f"{layer}self_attn.kv_a_layernorm.weight"

    def change(tensors):
        del tensors[f"{O_PROJ}_scale_inv"]
        tensors[f"{q_b}_scale_inv"] = torch.ones(2, 1)
        tensors[f"{gate}_scale_inv"] = torch.ones(1, 1, dtype=torch.float64)
        tensors[kv_b] = torch.ones(44, 8)
        tensors[norm] = torch.ones(8).to(torch.float8_e4m3fn)

    rewrite(tmp_path, change)
    assert refused(tmp_path) == [
        f"1 missing: {O_PROJ}_scale_inv",
        f"1 unexpected: {kv_b}_scale_inv",
        f"1 of another shape: {q_b}_scale_inv (must be [1, 1], got [2, 1])",
        f"2 of another dtype: {norm} (must be BF16, F16, F32, F64, got F8_E4M3), "
        f"{gate}_scale_inv (must be F32, BF16, F8_E8M0, got F64)",
    ]


def test_fp8_needs_a_quantization_config(directory):
    def change(tensors):
        tensors[O_PROJ] = tensors[O_PROJ].to(torch.float8_e4m3fn)
        tensors[f"{O_PROJ}_scale_inv"] = torch.ones(1, 1)

    rewrite(directory, change)
    assert refused(directory) == [
        f"1 unexpected: {O_PROJ}_scale_inv",
        f"1 of another dtype: {O_PROJ} (must be BF16, F16, F32, F64, got F8_E4M3, and nothing says that "
        "it is stored in 8 bits)",
    ]


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_what_is_written_is_found_again(shards, tmp_path):
    write_checkpoint(tmp_path, MTP, shards=shards, seed=3, dtype=torch.float16)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config == MTP and checkpoint.directory == tmp_path
    assert set(checkpoint.files) == set(expected(MTP)) | set(prediction(MTP, 2)) | set(prediction(MTP, 3))
    assert len({path.name for path in checkpoint.files.values()}) == shards
    for name, path in checkpoint.files.items():
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            wide = "bias" in name
            assert file.get_tensor(name).dtype == (torch.float32 if wide else torch.float16)


def test_weights_follow_from_the_seed_not_from_the_files(tmp_path):
    for folder, arguments in (("a", {}), ("b", {"shards": 2}), ("c", {"seed": 1})):
        write_checkpoint(tmp_path / folder, TINY, **arguments)
    a, b, c = (Checkpoint.open(tmp_path / folder).read(O_PROJ, dtype=torch.float32) for folder in "abc")
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize("shards", [0, len(expected(TINY)) + 1])
def test_no_file_may_be_empty(shards, tmp_path):
    with pytest.raises(InputError, match=rf"shards: must be in 1..{len(expected(TINY))}, .*: got {shards}"):
        write_checkpoint(tmp_path, TINY, shards=shards)


def test_a_checkpoint_is_not_written_over(directory):
    before = (directory / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match=r"directory: must not hold a checkpoint already: got .*config.json"):
        write_checkpoint(directory, TINY, shards=2)
    assert (directory / "model.safetensors").read_bytes() == before


def test_shards_are_files_beside_the_index(tmp_path):
    write_checkpoint(tmp_path, TINY, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"every file of weight_map must lie beside it: got ../elsewhere"):
        Checkpoint.open(tmp_path)


def test_files_that_are_not_there_or_not_readable(tmp_path):
    with pytest.raises(InputError, match=r"config.json: must be a readable file: No such file"):
        Checkpoint.open(tmp_path)
    write_checkpoint(tmp_path, TINY, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"every file of weight_map must be there: missing model-00002-of-00002"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index.json: must be JSON with an object weight_map"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"must have model.safetensors or model.safetensors.index.json: got neither"
    ):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors").write_text("no")
    with pytest.raises(CheckpointError, match=r"model.safetensors: must be a safetensors file"):
        Checkpoint.open(tmp_path)


def test_one_tensor_in_two_files(tmp_path):
    write_checkpoint(tmp_path, TINY, shards=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file({**load_file(second), "model.embed_tokens.weight": torch.zeros(16, 24)}, second)
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight must be in one file: got model-00001"):
        Checkpoint.open(tmp_path)
