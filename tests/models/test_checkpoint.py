"""A checkpoint directory: verified at once, read in slices that are those of the whole, and every refusal."""

import json

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from mla_fx import MlaConfig
from mla_fx.effects import InputError
from mla_fx.models import Checkpoint, CheckpointError, ModelConfig, small_config, write_checkpoint
from mla_fx.models.tensors import expected
from mla_fx.parameters import FullAttention, QueryLora, QueryPlain, shard_attention

TINY = evolve(
    small_config(),
    num_hidden_layers=2,
    vocab_size=16,
    attention=MlaConfig(
        hidden_size=24,
        num_attention_heads=4,
        q_lora_rank=10,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
    ),
)
PLAIN = evolve(TINY, model_type="deepseek_v2", attention=evolve(TINY.attention, q_lora_rank=None))


@pytest.fixture
def directory(tmp_path):
    write_checkpoint(tmp_path, TINY)
    return tmp_path


def full_attention(tensors: dict[str, torch.Tensor], layer: int, config: ModelConfig) -> FullAttention:
    def get(name: str) -> torch.Tensor:
        return tensors[f"model.layers.{layer}.self_attn.{name}.weight"]

    lora = config.attention.q_lora_rank is not None
    query = QueryLora(get("q_a_proj"), get("q_a_layernorm"), get("q_b_proj")) if lora else QueryPlain(get("q_proj"))
    return FullAttention(query, get("kv_a_proj_with_mqa"), get("kv_a_layernorm"), get("kv_b_proj"), get("o_proj"))


@pytest.mark.parametrize("replicate_query", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("config", [TINY, PLAIN], ids=["lora", "plain"])
@pytest.mark.parametrize("shards", [1, 3])
def test_slices_are_those_of_the_whole(config, ranks, replicate_query, shards, tmp_path):
    write_checkpoint(tmp_path, config, shards=shards)
    tensors = {k: v for path in tmp_path.glob("*.safetensors") for k, v in load_file(path).items()}
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config == config
    for rank in range(ranks):
        found = checkpoint.load_layer(1, rank=rank, ranks=ranks, dtype=torch.float64, replicate_query=replicate_query)
        whole = full_attention(tensors, 1, config)
        right = shard_attention(whole, config.attention, rank=rank, ranks=ranks, replicate_query=replicate_query)
        leaves = torch.utils._pytree.tree_leaves
        for ours, theirs in zip(leaves(found.attention), leaves(right), strict=True):
            assert ours.dtype == torch.float64 and ours.is_contiguous()
            assert torch.equal(ours, theirs.double())
        assert torch.equal(found.input_layernorm, tensors["model.layers.1.input_layernorm.weight"].double())


def test_shards_are_the_heads_in_rank_order(directory):
    """From the layout of kv_b_proj itself: per head first the key rows, then the value rows."""
    kv_b = load_file(directory / "model.safetensors")["model.layers.0.self_attn.kv_b_proj.weight"]
    found = Checkpoint.open(directory).load_layer(0, rank=1, ranks=2, dtype=torch.float32).attention
    for n, head in enumerate((2, 3)):
        rows = kv_b[head * 11 : (head + 1) * 11]
        assert torch.equal(found.w_uk[n], rows[:6])
        assert torch.equal(found.w_uv[n], rows[6:].T)


def test_embedding_reads_rows(directory):
    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    checkpoint = Checkpoint.open(directory)
    assert torch.equal(checkpoint.embed([3, 0, 3], dtype=torch.float32), table[[3, 0, 3]])
    assert checkpoint.embed([], dtype=torch.float32).shape == (0, 24)
    with pytest.raises(InputError, match=r"token_ids: each must be in 0..15: got 16"):
        checkpoint.embed([1, 16], dtype=torch.float32)


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_missing_unexpected_and_misshapen_are_told_at_once(directory):
    def change(tensors):
        for expert in range(4):
            del tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        del tensors["model.norm.weight"], tensors["lm_head.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
        tensors["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(24, 19)

    rewrite(directory, change)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    text = str(caught.value)
    assert "6 missing: model.layers.1.mlp.experts.0.up_proj.weight" in text and ", and 1 more" in text
    assert "1 unexpected: model.layers.0.self_attn.rotary_emb.inv_freq" in text
    assert "1 of another shape: model.layers.1.self_attn.o_proj.weight (must be [24, 20], got [24, 19])" in text


def test_prediction_layers_and_a_tied_head_may_be_there(tmp_path):
    config = evolve(TINY, num_nextn_predict_layers=1, tie_word_embeddings=True)
    write_checkpoint(tmp_path, config)

    def change(tensors):
        tensors["model.layers.2.eh_proj.weight"] = torch.zeros(24, 48)
        tensors["lm_head.weight"] = torch.zeros(16, 24)

    rewrite(tmp_path, change)
    Checkpoint.open(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"1 unexpected: model.layers.3.eh_proj.weight"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_weights_of_a_dtype_that_is_not_read_are_refused(dtype, directory):
    name = "model.layers.0.self_attn.o_proj.weight"
    rewrite(directory, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(
        CheckpointError, match=r"1 (of another dtype|FP8 tensors): model.layers.0.self_attn.o_proj.weight"
    ):
        Checkpoint.open(directory)


def test_scales_of_fp8_weights_are_called_so(directory):
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    rewrite(directory, lambda tensors: tensors.update({name: torch.ones(1, 1)}))
    with pytest.raises(CheckpointError, match=r"FP8 weights are not supported yet, .*: got 1 FP8 tensors: .*scale_inv"):
        Checkpoint.open(directory)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": 2}, r"layer: must be in 0..1: got 2"),
        ({"ranks": 3}, r"ranks: must divide num_attention_heads, 4: got 3"),
        ({"rank": 2}, r"rank: must be in 0..1: got 2"),
        ({"dtype": torch.int32}, r"dtype: must be floating: got torch.int32"),
    ],
)
def test_bad_requests(directory, arguments, message):
    with pytest.raises(InputError, match=message):
        Checkpoint.open(directory).load_layer(
            **{"layer": 0, "rank": 0, "ranks": 2, "dtype": torch.float32, **arguments}
        )


def test_every_layer_is_asked_for():
    """Counted by hand: embedding, norm and head; a dense and a MoE layer with 4 experts and a shared one."""
    attention, norms, mlp = 7, 2, 3
    assert len(expected(TINY)) == 3 + (attention + norms + mlp) + (attention + norms + 2 + 4 * mlp + mlp)
    assert json.loads(json.dumps(TINY.to_json()))["q_lora_rank"] == 10
