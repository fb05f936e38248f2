"""A plan is what a load and a run then hold, byte for byte; what it says fits, fits, and one more does not.

The right answers are tensors: of checkpoints that are really loaded, of a runner's caches, of a run on the host whose
results are counted while they are alive.
"""

import itertools
import json

import pytest
import torch
from attrs import evolve

from mla_fx import Layout, MlaConfig, StepShape, backends, orchestrations
from mla_fx.backends.meter import Metered
from mla_fx.cli import main
from mla_fx.cli_plan import memory_size
from mla_fx.dtypes import DTYPES
from mla_fx.effects import InputError, cost, schedule
from mla_fx.models import Engine, Loader, Runner, deepseek_v3_config, model_step
from mla_fx.models.plan import Plan, alike, largest_context, most_requests
from mla_fx.models.runner import Piece
from mla_fx.models.weights import expected
from tests.setups import checkpoint, model_config

leaves = torch.utils._pytree.tree_leaves
GIB = 2**30
#: 16 heads; nothing else is a multiple of the ranks.
CONFIG = model_config(3)
#: DeepSeek-V3's features of a head, and little else.
DEEP = MlaConfig(
    hidden_size=16,
    num_attention_heads=2,
    q_lora_rank=8,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
LAYOUTS = ["tp=1", "tp=8", "tp=8,dcp=2", "tp=4,dcp=4,dp=2", "tp=2,dcp=1,dp=4", "tp=1,dp=4"]


def held(tree) -> int:
    """Bytes of distinct tensors."""
    return sum(leaf.nbytes for leaf in {id(leaf): leaf for leaf in leaves(tree)}.values())


def plan(layout="tp=1", config=CONFIG, *, context=30, requests=2, **given) -> Plan:
    options = {name: given.pop(name) for name in ("chunk", "drafts", "workspace", "reserve") if name in given}
    shape = StepShape(ranks=Layout.parse(layout), requests=requests, block_size=4, **{"dtype": "fp32", **given})
    return Plan(config=config, shape=shape, context=context, **options)


# --- weights -------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("form", "tied"),
    [
        ({}, True),
        ({"quantization": "w8a8", "dtype": "bf16"}, False),
        ({"replicate_query": True, "dtype": "fp16"}, False),
        ({"project_before_merge": True, "quantization": "w8a8"}, False),
    ],
    ids=str,
)
def test_weights_are_those_that_a_load_holds(layout, form, tied):
    """Of the first rank, and of the last, whose shares are padding where there is little to share."""
    config = evolve(CONFIG, tie_word_embeddings=tied)
    asked = plan(layout, config, drafts=1, **form)
    found = dict(asked.weights)
    tables = found.pop("its embedding and head")  # which this checkpoint leaves out
    for rank in {0, asked.shape.ranks - 1}:
        loader = Loader(
            checkpoint=checkpoint(config),
            rank=rank,
            ranks=asked.shape.layout,
            dtype=DTYPES[asked.shape.dtype],
            quantization=asked.shape.quantization,
            **asked.shape.form,
        )
        model = loader.model()
        module = loader.mtp(model)
        assert held((model, module)) == sum(found.values())
        assert held(module._replace(embed_tokens=(), lm_head=())) == found["prediction module"]
        assert held((module.embed_tokens, module.lm_head)) == (tables if not tied else tables // 2)
        assert held(model.embed_tokens) == found["embedding"]
        assert ("head" in found) != tied
        networks = [layer.feed_forward for layer in model.layers]
        assert held([(one.gate_up_proj, one.down_proj) for one in networks[1:]]) == found["experts"]
        assert held([one.shared_experts for one in networks[1:]]) == found["shared experts"]
        assert held(networks[0]) == found["dense networks"]
        assert held([layer.attention for layer in model.layers]) == found["attention"]


def test_weights_of_one_rank_are_the_tensors_of_the_checkpoint():
    """Every tensor once, in the dtype; corrections of gates stay float32.  DeepSeek-V3 is a model of 671B."""
    config = deepseek_v3_config()
    tensors = expected(config).values()
    sizes = [(weight.kind, torch.Size(weight.shape).numel()) for weight in tensors]
    found = Plan(config=config, shape=StepShape(), context=1)
    assert sum(found.weights.values()) == sum(size * (4 if kind == "bias" else 2) for kind, size in sizes)
    assert round(sum(size for _, size in sizes) / 1e9) == 671


def test_a_module_s_own_tables_are_of_the_size_of_the_model_s():
    found = plan("tp=4", drafts=1).weights
    assert found["its embedding and head"] == found["embedding"] + found["head"]
    assert "its embedding and head" not in plan("tp=4").weights


# --- caches, values, staging -----------------------------------------------------------


def runner(asked: Plan, backend) -> Runner:
    """A runner with room for the plan's requests."""
    shape = evolve(asked.shape, blocks=asked.shape.requests * asked.blocks, table_width=asked.blocks)
    return Runner.load(checkpoint(asked.config), backend, shape=shape, mtp=asked.drafts > 0)


@pytest.mark.parametrize("layout", ["tp=1", "tp=4", "tp=4,dcp=2", "tp=2,dcp=1,dp=2"])
def test_caches_are_those_of_a_runner(layout):
    for context, drafts in ((33, 0), (64, 1)):
        asked = plan(layout, context=context, drafts=drafts)
        made = runner(asked, backends.get("cpu", ranks=asked.shape.layout))
        for rank in range(asked.shape.ranks):
            assert held((made.caches[rank], made.mtp_caches[rank : rank + 1])) == asked.cache
        assert made.sharding.blocks(context) == asked.blocks


@pytest.mark.parametrize(
    ("layout", "drafts", "form"),
    [
        ("tp=1", 1, {}),
        ("tp=4", 0, {}),
        ("tp=4", 2, {"dtype": "bf16"}),
        ("tp=4", 1, {"project_before_merge": True}),
        ("tp=8,dcp=2", 1, {"replicate_query": True}),
        ("tp=2,dcp=1,dp=2", 1, {}),
    ],
)
def test_values_are_those_alive_in_a_run(layout, drafts, form):
    """A step at its fullest, and the module's behind it while what the steps before gave is still there.

    Behind a history, since what a rank expands by itself holds less.
    """
    asked = plan(layout, requests=4, chunk=16, drafts=drafts, **form)
    metered = Metered.of(backends.get("cpu", ranks=asked.shape.layout))
    made, meter = runner(asked, metered), metered.meter
    rows, dp = range(min(4 * (1 + drafts), 16)), asked.shape.layout.dp
    tables = [list(range(k * asked.blocks, (k + 1) * asked.blocks)) for k in range(4)]
    peaks = []

    def alive(run, given):
        """What a run holds at its peak on the first rank, and what it was handed beside."""
        meter.values.clear()
        (logits, *_), hidden = run()
        peaks.append(meter.values[0] + sum(one.untyped_storage().nbytes() for one in given))
        return logits, hidden

    for tokens, filling in ((16, True), (len(rows), False)):
        pieces = [Piece(tokens=[1] * (tokens // 4), start=20, table=table) for table in tables]
        logits, hidden = alive(lambda p=pieces, f=filling: made.forward([p] * dp, [rows] * dp, filling=f), [])
        before = [logits, hidden[0]]
        for _ in range(drafts):
            given = [*before]
            logits, hidden = alive(
                lambda p=pieces, f=filling, h=hidden, n=tokens: made.predict(
                    [p] * dp, h, [range(n)] * dp, [rows] * dp, filling=f
                ),
                given,
            )
            before = [*before[:2], logits, hidden[0]]
    assert max(peaks) == asked.values


@pytest.mark.parametrize(
    ("layout", "form", "context", "tokens"),
    [
        ("tp=1", {}, 511, 512),
        ("tp=1", {}, 400, 256),
        ("tp=1", {}, 2048, 1024),
        ("tp=1", {"requests": 300}, 300, 512),
        ("tp=2", {}, 2048, 256),
        ("tp=2", {"project_before_merge": True}, 250, 256),
        ("tp=2", {"project_before_merge": True}, 2048, 1024),
        ("tp=2,dcp=1", {}, 1500, 512),
    ],
)
def test_a_step_has_as_many_tokens_as_an_engine_takes(layout, form, context, tokens):
    """With DeepSeek-V3's features of a head, which expanding pays for from 170 and 341 tokens on."""
    config = evolve(model_config(1, DEEP), first_k_dense_replace=1, moe=None)
    asked = plan(layout, config, context=context, **form)
    asked = evolve(asked, shape=evolve(asked.shape, block_size=64))
    shape = evolve(asked.shape, blocks=2, table_width=asked.blocks)
    made = Runner.load(checkpoint(config), backends.get("cpu", ranks=shape.layout), shape=shape)
    assert asked.tokens == Engine(runner=made).chunk == tokens
    assert max(step.shape.tokens for step in asked.steps()) == tokens


def test_values_do_not_depend_on_the_context():
    assert plan(context=1).values == plan(context=64).values
    assert plan(requests=4).values < plan(requests=8, chunk=64).values or plan(chunk=64).values == plan(chunk=33).values


def test_what_is_staged():
    """Tokens, positions and slots of 8 bytes, rows that are asked for, and a table of 4 for all requests."""
    asked = plan(context=30, requests=3, chunk=8)
    assert asked.blocks == 8 and asked.staging == 3 * 8 * 8 + 4 * 8 + 3 * 8 * 4
    split = {"orchestration": orchestrations.batch_pipelined, "prefill_orchestration": orchestrations.batch_pipelined}
    assert evolve(asked, **split).staging == 3 * 8 * 8 + 4 * 8 + 2 * 3 * 8 * 4
    sources = evolve(asked, drafts=1, chunk=6)
    assert sources.staging == 4 * 8 * 8 + 8 * 8 + 3 * 8 * 4


@pytest.mark.parametrize("name", orchestrations.NAMED)
def test_three_layers_of_a_kind_hold_as_much_as_many(name):
    config = evolve(model_config(9), first_k_dense_replace=4)
    orchestration = orchestrations.NAMED[name]
    shape = StepShape(ranks=4, tokens=8, requests=2, split=orchestration.split)
    few, all_ = (
        cost(schedule(model_step(each, shape, rows=4, hidden=True), orchestration)) for each in (alike(config), config)
    )
    assert alike(config).num_hidden_layers == 6 and few.memory.peak == all_.memory.peak


# --- what fits -------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tp=4", "tp=4,dcp=2"])
@pytest.mark.parametrize("room", [0, 1, 5000, 30_000])
def test_the_largest_context_and_batch_by_counting(layout, room):
    """Every context, and every number of requests, until one does not fit."""
    asked = plan(layout, context=20, reserve=1000, workspace=500)
    memory = evolve(asked, context=1, shape=evolve(asked.shape, requests=1)).total - 1 + room

    def context(blocks):
        return evolve(asked, context=blocks * 4 * asked.shape.dcp.size)

    def requests(count):
        return evolve(asked, shape=evolve(asked.shape, requests=count))

    for found, made, unit in (
        (largest_context(asked, memory), context, 4 * asked.shape.dcp.size),
        (most_requests(asked, memory), requests, 1),
    ):
        first = next(count for count in itertools.count(1) if made(count).total > memory)
        assert found == (first - 1) * unit


def test_a_total_is_the_sum_of_its_parts():
    asked = plan(workspace=7, reserve=11)
    parts = sum(asked.weights.values()) + asked.cache + asked.values + asked.staging
    assert asked.total == parts + 18


def test_deepseek_v3_in_8_bits_on_16_devices():
    """40.3 GiB of weights on each; with 2 GiB kept free, 16 requests of the model's whole context fit 64 GiB twice."""
    shape = StepShape(ranks=16, requests=16, quantization="w8a8")
    asked = Plan(config=deepseek_v3_config(), shape=shape, context=163_840, reserve=2 * GIB)
    expert = 3 * 7168 * 2048 + (2 * 2048 + 7168) * 4  # a byte a weight, a scale of four for each feature
    assert asked.weights["experts"] == 58 * 16 * expert and sum(asked.weights.values()) == 43_239_205_120
    assert asked.cache == 16 * 163_840 // 16 * 61 * 576 * 2
    assert asked.total < 64 * GIB and largest_context(asked, 64 * GIB) >= 2 * 163_840
    assert evolve(asked, shape=evolve(shape, quantization=None)).total > 64 * GIB


def test_deepseek_v3_of_all_layers_holds_what_three_of_a_kind_do():
    config, shape = deepseek_v3_config(), StepShape(ranks=16, tokens=16, requests=16)
    whole = cost(schedule(model_step(config, shape, rows=16, hidden=True), orchestrations.attention_aside))
    asked = Plan(config=config, shape=shape, context=1, chunk=16, prefill_orchestration=orchestrations.attention_aside)
    assert asked.values == whole.memory.peak and asked.sent == whole.sent


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"context": 0}, "context: must be an integer of at least 1: got 0"),
        ({"chunk": 0}, "chunk: must be an integer of at least 1: got 0"),
        ({"config": evolve(CONFIG, num_nextn_predict_layers=0), "drafts": 1}, "drafts: must be 0 for a model without"),
    ],
)
def test_refused(given, message):
    with pytest.raises(InputError, match=message):
        plan(**given)


def test_ranks_that_do_not_divide_the_heads():
    with pytest.raises(InputError, match="num_attention_heads: must be a multiple of the ranks, 3: got 8"):
        _ = plan("tp=3").weights


# --- the command -----------------------------------------------------------------------

V3 = ("plan", "--layout", "tp=16", "--quantization", "w8a8")


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 * GIB), ("64 GiB", 64 * GIB), ("64GB", 64 * 10**9), ("1.5MiB", 3 * 2**19), ("2TB", 2 * 10**12)],
)
def test_sizes(text, size):
    assert memory_size(text) == size


@pytest.mark.parametrize("text", ["64", "64G", "64gib", "GiB", "-1GiB", "64 GiB free", "", "1e3GiB", "0x1GiB"])
def test_what_is_no_size(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*V3, f"--device-memory={text}"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "--device-memory: must be a number and a unit, of KiB, MiB," in said
    assert f"as in 64GiB: got {text!r}" in said


def test_the_command_says_what_is_known_and_what_is_not(capsys):
    assert main([*V3, "--device-memory", "64GiB"]) == 0
    said = capsys.readouterr().out
    assert "DeepSeek-V3 as published: 61 layers, 128 heads, latent 512" in said
    assert "workspace" in said and "not known without the device, and not counted: --workspace says it" in said
    assert "it fits, with " in said
    assert main([*V3, "--device-memory", "64GiB", "--workspace", "1GiB"]) == 0
    assert "not known" not in capsys.readouterr().out
    assert main([*V3, "--device-memory", "40GiB"]) == 1
    assert "it does not fit: " in capsys.readouterr().out
    assert main([*V3, "--layout", "tp=16,dcp=8,dp=2,ep=32", "--device-memory", "64GiB"]) == 0
    said = capsys.readouterr().out
    assert "32 devices of 64.000 GiB" in said and "beside tp=32,dcp=8,dp=1,ep=32 with 32 requests a replica: " in said


def test_json_has_every_byte(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(deepseek_v3_config().to_json()))
    options = ("--context", "4096", "--requests", "32", "--drafts", "1", "--workspace", "1GiB", "--json")
    assert main([*V3, "--model", str(tmp_path), "--device-memory", "64GiB", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    shape = StepShape(ranks=16, requests=32, quantization="w8a8")
    asked = Plan(config=deepseek_v3_config(), shape=shape, context=4096, drafts=1, workspace=GIB, reserve=2 * GIB)
    assert found["held"]["cache"] == asked.cache and sum(found["held"].values()) == found["total"] == asked.total
    assert found["largest_context"] == largest_context(asked, 64 * GIB)
    assert found["most_requests"] == most_requests(asked, 64 * GIB)
    assert found["fits"] and found["workspace_known"] and found["beside"] == []


def test_what_a_layout_costs_and_saves(capsys, tmp_path):
    """dcp < tp holds each position tp / dcp times; replicas hold the attention dp times, and each its own cache."""
    config = evolve(CONFIG, moe=None)
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    asked = ["plan", "--model", str(tmp_path), "--layout", "tp=4,dcp=2,dp=2", "--device-memory", "3GiB"]
    assert main([*asked, "--json"]) == 0
    whole, one = json.loads(capsys.readouterr().out)["beside"]
    sizes = {"context": 8192, "reserve": 2 * GIB}
    mine, other = (
        Plan(config=config, shape=StepShape(ranks=layout, requests=requests), **sizes)
        for layout, requests in ((Layout(tp=4, dcp=2, dp=2), 16), (Layout(tp=8, dcp=2), 32))
    )
    assert whole["layout"] == "tp=4,dcp=4,dp=2,ep=8" and whole["cache"] == mine.cache // 2
    assert (one["layout"], one["requests"]) == ("tp=8,dcp=2,dp=1,ep=8", 32)
    assert one["cache"] == -mine.cache and one["weights"] == sum(mine.weights.values()) - sum(other.weights.values())
    assert one["weights"] > 0 and one["sent"] == mine.sent - other.sent < 0
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "each position on 2 ranks of a replica, tp / dcp" in said and "in each of 2 replicas" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", "163841"), "--context: must be at most max_position_embeddings, 163840: got 163841"),
        (("--layout", "tp=3,dcp=2"), "dcp: must divide tp, 3: got 2"),
        (("--layout", "tp=3"), "num_attention_heads: must be a multiple of the ranks, 3: got 128"),
        (("--orchestration", "none"), "--orchestration: must be one of"),
        (("--model", "/nowhere"), "--model: must be a checkpoint directory: got '/nowhere'"),
    ],
)
def test_the_command_refuses(options, message, capsys):
    assert main([*V3, "--device-memory", "64GiB", *options]) == 2
    assert message in capsys.readouterr().err
