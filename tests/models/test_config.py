"""`config.json`: published files, both forms of rotary parameters, round trips, and an error for what cannot be."""

import json
import math

import pytest
from attrs import asdict, evolve
from transformers import DeepseekV2Config, DeepseekV3Config

from mla_fx import MlaConfig, Yarn
from mla_fx.config import MoeConfig
from mla_fx.effects import InputError
from mla_fx.models import ModelConfig, deepseek_v3_config, load_config, small_config
from mla_fx.models.config_file import parse_config

#: As published, but for `auto_map`, which names Python files; what all have in common is said once.
COMMON = json.loads("""{
    "attention_bias": false, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_layer_freq": 1, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 128
}""")
OF_V2 = COMMON | json.loads("""{
    "architectures": ["DeepseekV2ForCausalLM"], "aux_loss_alpha": 0.001, "bos_token_id": 100000,
    "eos_token_id": 100001, "first_k_dense_replace": 1, "model_type": "deepseek_v2", "n_shared_experts": 2,
    "norm_topk_prob": false, "num_experts_per_tok": 6, "pretraining_tp": 1, "rope_scaling": {"beta_fast": 32,
    "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
    "type": "yarn"}, "scoring_func": "softmax", "seq_aux": true, "transformers_version": "4.33.1",
    "vocab_size": 102400
}""")
V2 = OF_V2 | json.loads("""{
    "ep_size": 1, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8,
    "n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_group": 3, "topk_method": "group_limited_greedy"
}""")
V2_LITE = OF_V2 | json.loads("""{
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": null, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy"
}""")
V3 = COMMON | json.loads("""{
    "architectures": ["DeepseekV3ForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "quantization_config":
    {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn"}, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "transformers_version": "4.33.1",
    "vocab_size": 129280
}""")
V3_1 = V3 | {"quantization_config": {**V3["quantization_config"], "scale_fmt": "ue8m0"}}
PUBLISHED = {"V2": V2, "V2-Lite": V2_LITE, "V3": V3, "V3.1": V3_1}


def read(name: str) -> ModelConfig:
    return parse_config(json.loads(json.dumps(PUBLISHED[name])))


@pytest.mark.parametrize("name", ["V3", "V3.1"])
def test_the_published_v3_is_the_one_that_is_built_in(name):
    assert read(name) == deepseek_v3_config()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention.hidden_size", 7168),
        ("attention.num_attention_heads", 128),
        ("attention.q_lora_rank", 1536),
        ("attention.kv_lora_rank", 512),
        ("attention.qk_nope_head_dim", 128),
        ("attention.qk_rope_head_dim", 64),
        ("attention.v_head_dim", 128),
        ("attention.rms_norm_eps", 1e-6),
        ("attention.latent_norm_eps", 1e-6),
        ("attention.rope_theta", 10000.0),
        ("attention.yarn.factor", 40.0),
        ("attention.yarn.original_max_position_embeddings", 4096),
        ("attention.yarn.beta_fast", 32.0),
        ("attention.yarn.beta_slow", 1.0),
        ("attention.yarn.mscale", 1.0),
        ("attention.yarn.mscale_all_dim", 1.0),
        ("attention.yarn.attention_factor", None),
        ("attention.yarn.angle_magnitude", 1.0),
        ("attention.softmax_scale", pytest.approx(0.1352337789, abs=5e-11)),
        ("moe.n_routed_experts", 256),
        ("moe.n_shared_experts", 1),
        ("moe.num_experts_per_tok", 8),
        ("moe.moe_intermediate_size", 2048),
        ("moe.n_group", 8),
        ("moe.topk_group", 4),
        ("moe.topk_method", "noaux_tc"),
        ("moe.scoring_func", "sigmoid"),
        ("moe.norm_topk_prob", True),
        ("moe.routed_scaling_factor", 2.5),
        ("model_type", "deepseek_v3"),
        ("num_hidden_layers", 61),
        ("first_k_dense_replace", 3),
        ("moe_layer_freq", 1),
        ("intermediate_size", 18432),
        ("vocab_size", 129280),
        ("num_nextn_predict_layers", 1),
        ("max_position_embeddings", 163840),
        ("tie_word_embeddings", False),
        ("bos_token_id", 0),
        ("eos_token_id", (1,)),
        ("storage", "fp8"),
    ],
)
def test_deepseek_v3(name, value):
    found = deepseek_v3_config()
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value


def test_experts_of_deepseek_v3_and_of_its_prediction_layer():
    config = deepseek_v3_config()
    assert [layer for layer in range(62) if not config.is_moe(layer)] == [0, 1, 2]
    assert not any(evolve(config, moe=None).is_moe(layer) for layer in range(62))
    every_other = evolve(config, num_hidden_layers=6, first_k_dense_replace=1, moe_layer_freq=2)
    assert [layer for layer in range(7) if every_other.is_moe(layer)] == [2, 4, 6]


def test_the_published_v2():
    yarn = Yarn(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
    config = read("V2")
    assert config == ModelConfig(
        model_type="deepseek_v2",
        attention=MlaConfig(
            hidden_size=5120,
            num_attention_heads=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            yarn=yarn,
        ),
        moe=MoeConfig(
            n_routed_experts=160,
            num_experts_per_tok=6,
            moe_intermediate_size=1536,
            n_shared_experts=2,
            n_group=8,
            topk_group=3,
            topk_method="group_limited_greedy",
            scoring_func="softmax",
            norm_topk_prob=False,
            routed_scaling_factor=16.0,
        ),
        num_hidden_layers=60,
        vocab_size=102400,
        intermediate_size=12288,
        first_k_dense_replace=1,
        max_position_embeddings=163840,
        bos_token_id=100000,
        eos_token_id=(100001,),
    )
    # YaRN's factor on the scores, squared: 0.1 * 0.707 * ln 40 + 1.
    assert config.attention.softmax_scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, rel=1e-14)
    assert config.rest["torch_dtype"] == "bfloat16" and config.rest["seq_aux"] is True


def test_the_published_v2_lite():
    config, v2 = read("V2-Lite"), read("V2")
    assert config.attention == evolve(v2.attention, hidden_size=2048, num_attention_heads=16, q_lora_rank=None)
    assert config.moe == evolve(
        v2.moe,
        n_routed_experts=64,
        moe_intermediate_size=1408,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        routed_scaling_factor=1.0,
    )
    assert (config.num_hidden_layers, config.intermediate_size, config.vocab_size) == (27, 10944, 102400)
    assert config.storage is None and config.num_nextn_predict_layers == 0


def of_transformers(name: str) -> dict:
    """The published file as transformers writes it after reading it."""
    given = {key: value for key, value in PUBLISHED[name].items() if key != "quantization_config"}
    return json.loads((DeepseekV3Config if name.startswith("V3") else DeepseekV2Config)(**given).to_json_string())


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_transformers_writes_it(name):
    written = of_transformers(name)
    assert "rope_parameters" in written and "rope_scaling" not in written
    assert parse_config(written) == evolve(read(name), storage=None)


def test_what_transformers_leaves_out_follows_from_the_type():
    """Version 5 neither knows `topk_method` and `scoring_func` in V3, nor groups of a greedy choice in V2."""
    written = json.loads(DeepseekV3Config(num_key_value_heads=128).to_json_string())
    assert "topk_method" not in written and "scoring_func" not in written
    moe = parse_config(written).moe
    assert (moe.topk_method, moe.scoring_func, moe.norm_topk_prob) == ("noaux_tc", "sigmoid", True)
    written = json.loads(DeepseekV2Config(num_experts_per_tok=2).to_json_string())
    assert written["n_group"] is None and written["topk_method"] == "greedy"
    moe = parse_config(written).moe
    assert (moe.n_group, moe.topk_group, moe.scoring_func, moe.norm_topk_prob) == (1, 1, "softmax", False)


@pytest.mark.parametrize("name", [*PUBLISHED, "small"])
def test_transformers_reads_what_we_write(name):
    config = evolve(small_config() if name == "small" else read(name), storage=None)
    theirs = (DeepseekV3Config if config.model_type == "deepseek_v3" else DeepseekV2Config)(**config.to_json())
    assert theirs.num_key_value_heads == theirs.num_attention_heads == config.attention.num_attention_heads
    assert theirs.q_lora_rank == config.attention.q_lora_rank
    assert theirs.routed_scaling_factor == config.moe.routed_scaling_factor
    rope = {key: value for key, value in theirs.rope_parameters.items() if key not in ("rope_type", "rope_theta")}
    assert rope == asdict(config.attention.yarn, filter=lambda _, value: value is not None)
    assert theirs.rope_parameters["rope_type"] == "yarn"


@pytest.mark.parametrize("name", PUBLISHED)
def test_round_trip_of_published_files(name):
    config = read(name)
    again = parse_config(json.loads(json.dumps(config.to_json())))
    assert again == config and again.rest == config.rest


SCALING = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 1.0}
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
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "rope_theta": 50000,
    "rope_scaling": SCALING,
}
AS_V2 = {"model_type": "deepseek_v2", "norm_topk_prob": False}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def test_fields_as_published():
    config = parse_config(GIVEN)
    assert config.attention.yarn == Yarn(factor=40.0, original_max_position_embeddings=128)
    assert config.attention.rope_theta == 50000.0
    assert [config.is_moe(layer) for layer in range(3)] == [False, True, True]
    assert config.max_position_embeddings == 4096


def test_rope_parameters_as_transformers_writes_them():
    new = {k: v for k, v in GIVEN.items() if not k.startswith("rope_")}
    new["rope_parameters"] = {**SCALING, "rope_type": "yarn", "rope_theta": 50000.0}
    assert parse_config(new).attention == parse_config(GIVEN).attention


def test_missing_mscales_mean_none():
    scaling = {k: v for k, v in SCALING.items() if "mscale" not in k}
    attention = parse_config({**GIVEN, "rope_scaling": scaling}).attention
    assert attention.softmax_scale == 12**-0.5
    assert attention.yarn.angle_magnitude == pytest.approx(1.3688879454, abs=1e-10)
    fixed = parse_config({**GIVEN, "rope_scaling": {**scaling, "attention_factor": 1.5}}).attention
    assert fixed.yarn.angle_magnitude == 1.5


def test_factor_from_the_lengths_when_it_is_null():
    scaling = {**SCALING, "factor": None}
    assert parse_config({**GIVEN, "rope_scaling": scaling}).attention.yarn.factor == 32.0


def test_a_beta_of_zero_or_null_is_the_default():
    for beta in (0, None):
        yarn = parse_config({**GIVEN, "rope_scaling": {**SCALING, "beta_fast": beta, "beta_slow": beta}}).attention.yarn
        assert (yarn.beta_fast, yarn.beta_slow) == (32.0, 1.0)


def test_no_low_rank_query_and_no_rope_scaling():
    config = parse_config({**GIVEN, "q_lora_rank": None, "rope_scaling": None})
    assert config.attention.q_lora_rank is None and config.attention.yarn is None


@pytest.mark.parametrize(
    "config", [parse_config(GIVEN), small_config(), deepseek_v3_config()], ids=["parsed", "small", "V3"]
)
def test_round_trip(config):
    assert parse_config(json.loads(json.dumps(config.to_json()))) == config


def test_a_null_is_a_missing_field():
    config = parse_config({**GIVEN, "hidden_act": None, "num_nextn_predict_layers": None, "n_shared_experts": None})
    assert config == parse_config(GIVEN) and config.moe.n_shared_experts == 0
    assert parse_config({**GIVEN, "rope_scaling": {**SCALING, "rope_theta": None}}) == config
    assert parse_config({**GIVEN, "rope_theta": None}).attention.rope_theta == 10000.0
    assert parse_config({**GIVEN, "n_routed_experts": None}).moe is None


def test_tokens_that_end_a_text():
    assert parse_config({**GIVEN, "eos_token_id": [1, 7]}).eos_token_id == (1, 7)
    assert parse_config({**GIVEN, "eos_token_id": 7}).eos_token_id == (7,)
    assert parse_config(GIVEN).eos_token_id == () and "eos_token_id" not in parse_config(GIVEN).to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type: must be one of deepseek_v2, deepseek_v3, .*: got 'llama'"),
        ({"model_type": None}, "model_type: must be one of .*: got None"),
        ({"kv_lora_rank": None}, "kv_lora_rank: must be given: got nothing"),
        ({"kv_lora_rank": 0}, "kv_lora_rank: must be an integer of at least 1: got 0"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers: must be an integer of at least 1: got '3'"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim: must be even, for pairs to rotate: got 5"),
        ({"mlp_bias": True}, "mlp_bias: only False is supported: got True"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size: must be given: got nothing"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: must be a finite number: got nan"),
        (
            {"rope_scaling": {**SCALING, "beta_fast": -1}},
            "beta_fast: must be a finite number of at least 0: got -1",
        ),
        (
            {"rope_scaling": {**SCALING, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor: only 1.0 is supported: got 0.5",
        ),
        ({"num_key_value_heads": 2}, "num_key_value_heads: must equal num_attention_heads, 4, in MLA: got 2"),
        ({"attention_bias": True}, "attention_bias: only False is supported: got True"),
        ({"rope_interleave": False}, "rope_interleave: only True is supported: got False"),
        ({"hidden_act": "gelu"}, "hidden_act: only 'silu' is supported: got 'gelu'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: must be true or false: got 1"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: must be a number: got 'small'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: must be a number above 0: got 0"),
        ({"quantization_config": "fp8"}, "quantization_config: must be an object: got 'fp8'"),
        ({"quantization_config": {**FP8, "fmt": "e5m2"}}, "config.fmt: only 'e4m3' is supported: got 'e5m2'"),
        (
            {"quantization_config": {**FP8, "weight_block_size": [64, 128]}},
            r"config.weight_block_size: only \[128, 128\] is supported: got \[64, 128\]",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}},
            "rope_scaling: must say what rope_parameters says, {'rope_type': 'default'}, .*: got {'type': 'yarn', .*}",
        ),
        (
            {"rope_parameters": {**SCALING, "rope_theta": 1e4}},
            "rope_theta: must be rope_parameters.rope_theta, 10000.0, where both are given: got 50000.0",
        ),
        ({"rope_parameters": {**SCALING, "mscale": 0.5}}, "rope_scaling: must say what rope_parameters says"),
        (
            {"rope_scaling": {**SCALING, "rope_theta": 1e4}},
            "rope_theta: must be rope_scaling.rope_theta, .*: got 50000.0",
        ),
        ({"rope_scaling": {**SCALING, "rope_type": "default"}}, "rope_scaling.type: must be rope_type, .*: got 'yarn'"),
        ({"rope_scaling": {**SCALING, "long_factor": [2]}}, r"rope_scaling.long_factor: not a field .*: got \[2\]"),
        ({"rope_theta": 1}, "rope_theta: must be a number above 1: got 1.0"),
        ({"rope_theta": 10**400}, "rope_theta: must be a finite number: got 1000"),
        ({"sliding_window": 4096, "alpha": 1}, "alpha, sliding_window: not fields of deepseek_v3: got 1"),
        ({"fp8": True}, "fp8: not fields of deepseek_v3: got True"),
        ({"eos_token_id": [1, -1]}, "eos_token_id: must be an integer of at least 0: got -1"),
        ({"topk_method": "greedy"}, "topk_method: must be noaux_tc in deepseek_v3: got 'greedy'"),
        ({"topk_method": 3}, "topk_method: must be noaux_tc in deepseek_v3: got 3"),
        ({"scoring_func": "softmax"}, "scoring_func: must be sigmoid in deepseek_v3: got 'softmax'"),
        ({"n_group": 3}, "n_group: must divide n_routed_experts, 4: got 3"),
        ({"n_group": 4}, "n_group: a group must have two of the 4 n_routed_experts, .*: got 4"),
        ({"n_group": None}, "n_group: must be given: got nothing"),
        ({"topk_group": 3}, "topk_group: must be at most n_group, 2: got 3"),
        ({"topk_group": None}, "topk_group: must be given: got nothing"),
        ({"num_experts_per_tok": 3}, "num_experts_per_tok: must be at most 2, the experts of 1 groups: got 3"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor: must be given: got nothing"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor: must be a number above 0: got 0.0"),
        (
            {**AS_V2, "topk_method": "noaux_tc"},
            "topk_method: must be greedy or group_limited_greedy in .*: got 'noaux_tc'",
        ),
        ({**AS_V2, "scoring_func": "sigmoid"}, "scoring_func: must be softmax in deepseek_v2: got 'sigmoid'"),
        ({**AS_V2, "norm_topk_prob": True}, "norm_topk_prob: must be False in deepseek_v2: got True"),
        ({**AS_V2, "topk_method": "group_limited_greedy", "n_group": None}, "n_group: must be given: got nothing"),
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
            {"rope_scaling": {**SCALING, "factor": 0.5}},
            "factor: must be a number of at least 1: got 0.5",
        ),
        (
            {"rope_scaling": {**SCALING, "truncate": False}},
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
