"""Every row of the table of models: the published config.json read as it is, and a small model of its form.

transformers has the class and writes the small model; its config.json is then replaced by the published one with
smaller sizes, and logits are held against transformers' as in `test_model_agreement`.  Architectures that are something
else are refused with what they have that is missing.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
)

from mla_fx import Yarn
from mla_fx.effects import InputError
from mla_fx.models import Checkpoint, load_config
from mla_fx.models.config_file import parse_config
from mla_fx.models.families import FAMILIES, OTHERS
from tests.models.test_config import V2, V2_LITE, V3, V3_1
from tests.models.test_model_agreement import PROMPT, agree, ours

ROOT = Path(__file__).parents[2]
FP8 = V3["quantization_config"]
MOONLIGHT = json.loads("""{
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 163584, "eos_token_id": 163586, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11264, "kv_lora_rank": 512,
    "max_position_embeddings": 8192, "model_type": "deepseek_v3", "moe_intermediate_size": 1408, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": true, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0,
    "pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "seq_aux": true,
    "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.46.3", "use_cache": true, "v_head_dim": 128, "vocab_size": 163840
}""")
KIMI_K2 = V3 | json.loads("""{
    "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1,
    "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1, "n_routed_experts": 384,
    "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
    "seq_aux": true, "topk_group": 1, "transformers_version": "4.48.3", "vocab_size": 163840
}""")
INT4 = json.loads("""{
    "config_groups": {"group_0": {"input_activations": null, "output_activations": null, "targets": ["Linear"],
    "weights": {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": true, "type": "int"}}},
    "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"], "quant_method": "compressed-tensors"
}""")
KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163585,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k25",
    "pad_token_id": 163839,
    "text_config": KIMI_K2
    | {
        "max_position_embeddings": 262144,
        "quantization_config": INT4,
        "rms_norm_eps": 1e-5,
        "rope_scaling": KIMI_K2["rope_scaling"] | {"beta_fast": 32.0, "factor": 64.0},
        "sliding_window": None,
        "temperature": 1.0,
    },
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {"patch_size": 14, "vt_hidden_size": 1152, "vt_num_hidden_layers": 27},
}
GLM_47_FLASH = json.loads("""{
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 20, "num_experts_per_tok": 4,
    "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "pad_token_id": 154820,
    "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
    "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc", "transformers_version": "5.0.0rc0",
    "v_head_dim": 256, "vocab_size": 154880
}""")


@frozen
class Row:
    """A model of the table: its published fields, facts of it, and what its small form has in other sizes."""

    published: dict[str, Any]
    #: Layers, heads, nope, value, experts, experts a token, factor of the weights, softmax scale.
    facts: tuple[int, int, int, int, int, int, float, float]
    small: dict[str, Any]


YARN_SCALE = 0.1352337789  # 192^-0.5 (0.1 ln 40 + 1)^2
V2_SCALE = 0.1147213868  # 192^-0.5 (0.0707 ln 40 + 1)^2
ROWS = {
    "DeepSeek-V2": Row(V2, (60, 128, 128, 128, 160, 6, 16.0, V2_SCALE), {"n_routed_experts": 16}),
    "DeepSeek-V2-Lite": Row(V2_LITE, (27, 16, 128, 128, 64, 6, 1.0, V2_SCALE), {}),
    "DeepSeek-V2.5": Row(V2, (60, 128, 128, 128, 160, 6, 16.0, V2_SCALE), {"n_routed_experts": 24}),
    "DeepSeek-V3": Row(V3, (61, 128, 128, 128, 256, 8, 2.5, YARN_SCALE), {"n_routed_experts": 32}),
    "DeepSeek-R1": Row(V3, (61, 128, 128, 128, 256, 8, 2.5, YARN_SCALE), {"n_routed_experts": 16}),
    "DeepSeek-V3.1": Row(V3_1, (61, 128, 128, 128, 256, 8, 2.5, YARN_SCALE), {"n_routed_experts": 16}),
    "Moonlight-16B-A3B": Row(MOONLIGHT, (27, 16, 128, 128, 64, 6, 2.446, 192**-0.5), {}),
    # (0.1 ln 32 + 1)^2 and (0.1 ln 64 + 1)^2
    "Kimi-K2": Row(
        KIMI_K2,
        (61, 64, 128, 128, 384, 8, 2.827, 0.1308608000),
        {"n_routed_experts": 384, "moe_intermediate_size": 4, "num_hidden_layers": 2},  # one of them with experts
    ),
    "Kimi-K2.5": Row(KIMI_K25, (61, 64, 128, 128, 384, 8, 2.827, 0.1446796258), {"n_routed_experts": 16}),
    "GLM-4.7-Flash": Row(
        GLM_47_FLASH,
        (47, 20, 192, 256, 64, 4, 1.8, 256**-0.5),
        {"num_attention_heads": 20, "num_key_value_heads": 20, "qk_nope_head_dim": 12, "v_head_dim": 16},
    ),
}
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 32,
    "kv_lora_rank": 16,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size": 101,
}


def text_of(fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = fields.get("text_config", fields)
    return found


def shrunk(row: Row) -> dict[str, Any]:
    """The published fields with smaller sizes, weights not in 8 bits; everything that is not a size is kept."""
    text = text_of(row.published)
    text = {**text, **SMALL, **row.small, "num_experts_per_tok": min(text["num_experts_per_tok"], 6)}
    text["first_k_dense_replace"] = min(text["first_k_dense_replace"], 2)
    for name in ("quantization_config", "pad_token_id"):
        text.pop(name, None)
    if text["q_lora_rank"] is not None:
        text["q_lora_rank"] = 24
    if text.get("rope_scaling"):
        text["rope_scaling"] = {**text["rope_scaling"], "factor": 4.0, "original_max_position_embeddings": 32}
    return {**row.published, "text_config": text} if "text_config" in row.published else text


def of_transformers(fields: dict[str, Any], directory: Path) -> Any:
    """transformers' own model of these sizes, with weights that hide nothing, written with its config.json."""
    text = {
        name: value
        for name, value in text_of(fields).items()
        if name not in ("model_type", "auto_map", "torch_dtype", "dtype")
    }
    text |= {"initializer_range": 0.2, "attn_implementation": "eager"}
    torch.manual_seed(3)
    if fields["model_type"] == "kimi_k25":
        vision = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
        config = Kimi_K25Config(
            text_config={"model_type": "kimi_k2", **text},
            vision_config=vision,
            projection_hidden_size=32,
            tie_word_embeddings=False,
        )
        model = Kimi_K25ForConditionalGeneration(config)
    elif fields["model_type"] == "glm4_moe_lite":
        model = Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**text))
    elif fields["model_type"] == "deepseek_v2":
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**text))
    else:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**text))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:
            torch.nn.init.normal_(tensor, 1.0, 0.2)
        if "e_score_correction_bias" in name:
            torch.nn.init.normal_(tensor, 0.0, 0.3)
    model.eval().save_pretrained(directory)
    if fields["model_type"] == "kimi_k25":
        # This release writes the text model's layers under a name that neither it nor the published files have.
        tensors = load_file(directory / "model.safetensors")
        tensors = {name.replace("language_model.model.blocks.", "language_model.model.layers."): each
                   for name, each in tensors.items()}  # fmt: skip
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("name", ROWS)
def test_the_published_configuration(name):
    row = ROWS[name]
    config = parse_config(json.loads(json.dumps(row.published)))
    attention, moe = config.attention, config.moe
    assert moe is not None
    layers, heads, nope, value, experts, per_token, factor, scale = row.facts
    assert (config.num_hidden_layers, attention.num_attention_heads) == (layers, heads)
    assert (attention.qk_nope_head_dim, attention.v_head_dim) == (nope, value)
    assert (attention.kv_lora_rank, attention.qk_rope_head_dim) == (512, 64)
    assert (moe.n_routed_experts, moe.num_experts_per_tok, moe.routed_scaling_factor) == (experts, per_token, factor)
    assert attention.softmax_scale == pytest.approx(scale, rel=1e-6)
    assert attention.rms_norm_eps == text_of(row.published)["rms_norm_eps"] and attention.latent_norm_eps == 1e-6
    assert not config.is_moe(0) and config.is_moe(config.first_k_dense_replace)


@pytest.mark.parametrize("name", ROWS)
def test_a_small_model_of_its_form(name, tmp_path):
    fields = shrunk(ROWS[name])
    model = of_transformers(fields, tmp_path)
    written = load_config(tmp_path)  # what transformers says of it
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_config(tmp_path)
    assert (written.attention, written.moe) == (config.attention, config.moe)
    assert written.first_k_dense_replace == config.first_k_dense_replace
    heads = config.attention.num_attention_heads
    prompt = torch.randint(101, (PROMPT,), generator=torch.Generator().manual_seed(4)).tolist()
    agree(model, *ours(tmp_path, prompt, 4 if heads == 20 else 2, 1, decoded=6))


def test_the_table_names_every_row():
    """The table in the README of `models`, with each model's `model_type`."""
    text = (ROOT / "models" / "README.md").read_text()
    rows = dict(re.findall(r"^\| ([\w.-]+) \| `(\w+)` \|", text, re.MULTILINE))
    assert rows.pop("model") == "model_type"  # the head of the table
    assert rows == {name: row.published["model_type"] for name, row in ROWS.items()}
    assert {row.published["model_type"] for row in ROWS.values()} == set(FAMILIES)


def test_experts_of_k2_and_a_ramp_of_one_pair():
    """384 experts in one group; YaRN's two betas are one, so the frequencies step between two pairs, 19 and 20."""
    config = parse_config(KIMI_K2)
    assert config.attention.yarn == Yarn(
        factor=32.0, original_max_position_embeddings=4096, beta_fast=1.0, beta_slow=1.0
    )
    assert (config.moe.n_group, config.moe.topk_group) == (1, 1)


def test_k2_renamed_is_k2():
    renamed = parse_config({**KIMI_K2, "model_type": "deepseek_v3"})
    own = parse_config(KIMI_K2)
    assert (renamed.attention, renamed.moe, renamed.storage) == (own.attention, own.moe, "fp8")
    assert (own.model_type, renamed.model_type) == ("kimi_k2", "deepseek_v3")


def test_what_lies_around_a_text_model_is_noted_and_not_read(tmp_path):
    fields = shrunk(ROWS["Kimi-K2.5"])
    of_transformers(fields, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config.model_type == "kimi_k2" and checkpoint.config.prefix == "language_model."
    assert checkpoint.config.eos_token_id == (163585,)
    (note,) = checkpoint.notes
    assert re.fullmatch(r"\d+ tensors of mm_projector, model, vision_tower are not read: they are other parts", note)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"1 missing: model\.norm\.weight"):
        Checkpoint.open(tmp_path)


def test_text_fields_that_are_no_object():
    with pytest.raises(InputError, match=r"text_config: must be an object, the text model's fields: got None"):
        parse_config({**KIMI_K25, "text_config": None})


def test_layers_by_a_list_of_their_kinds():
    given = {name: value for name, value in GLM_47_FLASH.items() if name != "first_k_dense_replace"}
    assert parse_config(given).first_k_dense_replace == 1
    kinds = ["dense"] * 2 + ["sparse"] * 45
    assert parse_config({**given, "mlp_layer_types": kinds}).first_k_dense_replace == 2
    assert parse_config({**given, "mlp_layer_types": ["dense"] * 47}).first_k_dense_replace == 47
    for wrong in (kinds[:-1], kinds[::-1], ["sparse", "dense", *["sparse"] * 45], "dense", ["other"] * 47):
        with pytest.raises(InputError, match=r"mlp_layer_types: must be 47 layers, those that are 'dense' before"):
            parse_config({**given, "mlp_layer_types": wrong})


#: `model_type`, `architectures`, and what it has that is missing, of other models with latent attention.
REFUSED = [
    ("deepseek_v32", "DeepseekV32ForCausalLM", "an indexer"),
    ("glm_moe_dsa", "GlmMoeDsaForCausalLM", "an indexer"),
    ("longcat_flash", "LongcatFlashForCausalLM", "two attentions in each layer"),
    ("kimi_linear", "KimiLinearForCausalLM", "layers of linear attention"),
    ("deepseek_v4", "DeepseekV4ForCausalLM", "compressed keys and values"),
    ("mistral4", "Mistral4ForCausalLM", "queries that are scaled by their position"),
    ("deepseek_v3", "MistralLarge3ForCausalLM", "queries that are scaled by their position"),
]


@pytest.mark.parametrize(("model_type", "architecture", "missing"), REFUSED)
def test_other_architectures_are_refused_in_one_sentence(model_type, architecture, missing):
    given = {**V3, "model_type": model_type, "architectures": [architecture], "index_topk": 2048}
    with pytest.raises(InputError) as caught:
        parse_config(given)
    assert re.fullmatch(rf"model_type: \w+ has {missing}.*; that is not implemented", str(caught.value))


def test_a_refused_text_model_within_another():
    given = {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}
    with pytest.raises(InputError, match=r"model_type: mistral4 has queries that are scaled by their position; "):
        parse_config(given)


def test_what_a_family_says_of_missing_fields():
    """As the published code has them: its own configuration's defaults."""
    for given in (V3, KIMI_K2, GLM_47_FLASH):
        moe = parse_config({**given, "norm_topk_prob": None, "topk_method": None, "scoring_func": None}).moe
        assert (moe.norm_topk_prob, moe.topk_method, moe.scoring_func) == (True, "noaux_tc", "sigmoid")
    lite = {**V2_LITE, "norm_topk_prob": None, "topk_method": None, "scoring_func": None, "routed_scaling_factor": None}
    moe = parse_config(lite).moe
    assert (moe.norm_topk_prob, moe.topk_method, moe.scoring_func) == (False, "greedy", "softmax")
    assert moe.routed_scaling_factor == 1.0
    glm = parse_config({**GLM_47_FLASH, "n_group": None, "topk_group": None, "rms_norm_eps": None})
    assert (glm.moe.n_group, glm.moe.topk_group, glm.attention.rms_norm_eps) == (1, 1, 1e-5)
    with pytest.raises(InputError, match=r"n_group: must be given: got nothing"):
        parse_config({**V3, "n_group": None})


def test_what_is_refused_is_not_read():
    assert not set(OTHERS) & set(FAMILIES)
    with pytest.raises(InputError, match=r"model_type: must be one of deepseek_v2, .*, glm4_moe_lite: got \['a'\]"):
        parse_config({**V3, "model_type": ["a"]})
