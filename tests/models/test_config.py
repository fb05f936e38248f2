"""`config.json`: both forms of rotary parameters, round trips, and an error for each field that cannot be."""

import json

import pytest

from mla_fx import Yarn
from mla_fx.effects import InputError
from mla_fx.models import load_config, small_config
from mla_fx.models.config import parse_config

GIVEN = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "rope_theta": 50000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def test_fields_as_published():
    config = parse_config(GIVEN)
    assert config.attention.yarn == Yarn(factor=40.0, original_max_position_embeddings=128)
    assert config.attention.rope_theta == 50000.0
    assert [config.is_moe(layer) for layer in range(3)] == [False, True, True]
    assert config.rest["max_position_embeddings"] == 4096


def test_rope_parameters_as_transformers_writes_them():
    new = {k: v for k, v in GIVEN.items() if not k.startswith("rope_")}
    new["rope_parameters"] = {**GIVEN["rope_scaling"], "rope_type": "yarn", "rope_theta": 50000.0}
    assert parse_config(new).attention == parse_config(GIVEN).attention


def test_missing_mscales_mean_none():
    scaling = {k: v for k, v in GIVEN["rope_scaling"].items() if "mscale" not in k}
    attention = parse_config({**GIVEN, "rope_scaling": scaling}).attention
    assert attention.softmax_scale == 12**-0.5
    assert attention.yarn.angle_magnitude == pytest.approx(1.3688879454, abs=1e-10)
    fixed = parse_config({**GIVEN, "rope_scaling": {**scaling, "attention_factor": 1.5}}).attention
    assert fixed.yarn.angle_magnitude == 1.5


def test_factor_from_the_lengths_when_it_is_null():
    scaling = {**GIVEN["rope_scaling"], "factor": None}
    assert parse_config({**GIVEN, "rope_scaling": scaling}).attention.yarn.factor == 32.0


def test_a_beta_of_zero_or_null_is_the_default():
    for beta in (0, None):
        yarn = parse_config(
            {**GIVEN, "rope_scaling": {**GIVEN["rope_scaling"], "beta_fast": beta, "beta_slow": beta}}
        ).attention.yarn
        assert (yarn.beta_fast, yarn.beta_slow) == (32.0, 1.0)


def test_no_low_rank_query_and_no_rope_scaling():
    config = parse_config({**GIVEN, "q_lora_rank": None, "rope_scaling": None})
    assert config.attention.q_lora_rank is None and config.attention.yarn is None


@pytest.mark.parametrize("config", [parse_config(GIVEN), small_config()], ids=["parsed", "small"])
def test_round_trip(config):
    assert parse_config(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type: must be one of deepseek_v2, deepseek_v3: got 'llama'"),
        ({"model_type": None}, "model_type: must be one of .*: got None"),
        ({"kv_lora_rank": None}, "kv_lora_rank: must be given: got nothing"),
        ({"kv_lora_rank": 0}, "kv_lora_rank: must be an integer of at least 1: got 0"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers: must be an integer of at least 1: got '3'"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim: must be even, for pairs to rotate: got 5"),
        ({"mlp_bias": True}, "mlp_bias: only False is supported: got True"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size: must be given: got nothing"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: must be a finite number: got nan"),
        (
            {"rope_scaling": {**GIVEN["rope_scaling"], "beta_fast": -1}},
            "beta_fast: must be a finite number of at least 0: got -1",
        ),
        (
            {"rope_scaling": {**GIVEN["rope_scaling"], "partial_rotary_factor": 0.5}},
            "partial_rotary_factor: only 1.0 is supported: got 0.5",
        ),
        ({"num_key_value_heads": 2}, "num_key_value_heads: must equal num_attention_heads, 4, in MLA: got 2"),
        ({"attention_bias": True}, "attention_bias: only False is supported: got True"),
        ({"rope_interleave": False}, "rope_interleave: only True is supported: got False"),
        ({"hidden_act": "gelu"}, "hidden_act: only 'silu' is supported: got 'gelu'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: must be true or false: got 1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: must be a number: got 'small'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: must be a number above 0: got 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not supported yet: got .*fp8"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_scaling: must not be given beside rope_parameters"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling: the type must be 'default' or 'yarn': got 'linear'",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling: must be an object: got 'yarn'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 40}},
            "rope_scaling.original_max_position_embeddings: must be given",
        ),
        (
            {"rope_scaling": {**GIVEN["rope_scaling"], "factor": 0.5}},
            "factor: must be a number of at least 1: got 0.5",
        ),
        (
            {"rope_scaling": {**GIVEN["rope_scaling"], "truncate": False}},
            "rope_scaling.truncate: only True is supported: got False",
        ),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(InputError, match=message):
        parse_config({**GIVEN, **changes})


def test_file_and_field_are_named(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InputError, match=r"config.json: must be an object: got list"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{,")
    with pytest.raises(InputError, match=r"config.json: must be JSON: Expecting property name"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**GIVEN, "v_head_dim": -1}))
    with pytest.raises(InputError, match=r"config.json: v_head_dim: must be an integer of at least 1: got -1"):
        load_config(tmp_path)
