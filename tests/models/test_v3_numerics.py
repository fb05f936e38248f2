"""Facts of DeepSeek-V3's numbers that are the model's, a row each.

Those of the attention's constants (softmax scale, mscale, YaRN frequencies,
rotation) are in `tests/test_numerics.py`; of the configuration in
`test_config.py`; of FP8 blocks, element by element, in `test_quantize.py`; of
the gate's choice, by an oracle, in `tests/ops/test_gating_top_k.py`.
"""

import math

import pytest
import torch
from attrs import evolve

from mla_fx import StepShape, backends, gating, orchestrations
from mla_fx.backends import Run, cpu, reference
from mla_fx.backends.rules import parameters
from mla_fx.effects import Aval, ops, schedule, trace
from mla_fx.models import deepseek_v3_config
from mla_fx.models.prediction import _settled
from mla_fx.models.quantize import dequantize_fp8, scale_shape
from mla_fx.models.request import Request, Served
from mla_fx.models.weights import model_avals, mtp_avals, prediction
from tests.setups import CONFIG, Setup

V3 = deepseek_v3_config()
assert V3.moe is not None
EIGHT = model_avals(V3, StepShape(ranks=8, tokens=4, requests=4))


def gate(moe) -> ops.GatingTopK:
    experts = moe.n_routed_experts
    shapes = {"logits": Aval((4, experts), "fp32"), "bias": Aval((experts,), "fp32")}
    (equation,) = trace(lambda logits, bias: gating(logits, bias, config=moe), **shapes).equations
    return equation.op


def test_gate_of_v3():
    """Sigmoid, the two best of each of 8 groups of 32 added, 4 groups stay, 8 experts, weights times 2.5."""
    assert gate(V3.moe) == ops.GatingTopK(
        top_k=8, groups=8, top_groups=4, scoring="sigmoid", group_score="top2", normalise=True, scale=2.5
    )


def test_gate_of_v2():
    """Softmax, the best of each group, weights as they are times the factor; V2-Lite without groups."""
    moe = evolve(V3.moe, topk_method="group_limited_greedy", scoring_func="softmax", norm_topk_prob=False)
    assert gate(moe) == ops.GatingTopK(
        top_k=8, groups=8, top_groups=4, scoring="softmax", group_score="max", normalise=False, scale=2.5
    )
    greedy = gate(evolve(moe, topk_method="greedy"))
    assert (greedy.groups, greedy.top_groups) == (1, 1)


@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
def test_weights_are_unbiased_and_sum_to_the_factor(backend):
    """The bias chooses; the weight is the plain sigmoid over the sum of those chosen, plus 1e-20, times 2.5."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 256, generator=generator, dtype=torch.float64)
    bias = torch.zeros(256, dtype=torch.float64)
    bias[[3, 200]] = 10.0  # chosen whatever the logits say
    chosen = gate(V3.moe)
    weights, experts = backend.TABLE.rules[ops.GatingTopK](logits, bias, run=Run(), **parameters(chosen))
    assert all({3, 200} <= set(row) for row in experts.tolist())
    for t in range(5):
        plain = [1 / (1 + math.exp(-logits[t, x].item())) for x in experts[t].tolist()]
        for weight, p in zip(weights[t].tolist(), plain, strict=True):
            assert weight == pytest.approx(2.5 * p / (sum(plain) + 1e-20), rel=1e-12)
    nothing, _ = backend.TABLE.rules[ops.GatingTopK](
        torch.full_like(logits, -math.inf), bias, run=Run(), **parameters(chosen)
    )
    assert (nothing == 0).all()  # and not 0 / 0


def test_shares_of_eight_ranks():
    """256 experts of 2048 and one shared one, 3 dense layers of 18432, 129280 rows of the vocabulary, 128 heads."""
    assert len(EIGHT.layers) == 61 and EIGHT.embed_tokens.shape == EIGHT.lm_head.shape == (16160, 7168)
    for layer, params in enumerate(EIGHT.layers):
        feed_forward = params.feed_forward
        if layer < 3:
            assert feed_forward.gate_up_proj.shape == (2 * 2304, 7168)
            assert feed_forward.down_proj.shape == (7168, 2304)
        else:
            assert feed_forward.gate_up_proj.shape == (32, 4096, 7168)
            assert feed_forward.down_proj.shape == (32, 7168, 2048)
            assert feed_forward.shared_experts.down_proj.shape == (7168, 256)
            assert feed_forward.gate.shape == (256, 7168)
            assert str(feed_forward.e_score_correction_bias) == "fp32[256]"
        assert params.attention.query.q_b_proj.shape == (16 * 192, 1536)


def test_shared_experts_are_one_network_of_their_summed_width():
    two = model_avals(evolve(V3, moe=evolve(V3.moe, n_shared_experts=2)), StepShape(ranks=8, tokens=4, requests=4))
    assert two.layers[3].feed_forward.shared_experts.gate_up_proj.shape == (2 * 2 * 256, 7168)


def test_latent_is_cached_normalised_and_the_key_rotated_only():
    """Of the 576 features of kv_a the first 512 go through kv_a_layernorm, with epsilon 1e-6; the last 64 do not."""
    setup = Setup(ranks=1, dtype="fp64", tokens=2, requests=1)
    params, caches, hidden = setup.params(), setup.caches(), setup.hidden()
    run = setup.compiled(backends.get("reference"), schedule(setup.step, orchestrations.serial))
    hidden = [hidden[0] * 1e-3]  # small, so that the epsilon counts
    _, (cache,) = run(caches, hidden, setup.batches(history=(1,), query=(2,)))
    kv = hidden[0] @ params[0].kv_a_proj.T
    latent, rope = CONFIG.kv_lora_rank, CONFIG.qk_rope_head_dim
    norm = (kv[:, :latent].square().mean(1, keepdim=True) + 1e-6).sqrt()
    normalised = kv[:, :latent] / norm * params[0].kv_a_layernorm
    torch.testing.assert_close(cache.latent[0, 1:3], normalised, rtol=1e-12, atol=1e-12)
    pairs = kv[:, latent:].view(2, rope // 2, 2).norm(dim=2)  # a rotation keeps the length of every pair
    rotated = torch.stack([cache.rope[0, 1:3, : rope // 2], cache.rope[0, 1:3, rope // 2 :]], 2).norm(dim=2)
    assert CONFIG.yarn is not None
    torch.testing.assert_close(rotated, pairs * CONFIG.yarn.angle_magnitude, rtol=1e-12, atol=1e-15)


def test_epsilon_of_the_latent_norms_is_not_that_of_the_config():
    assert evolve(V3.attention, rms_norm_eps=1e-3).latent_norm_eps == 1e-6


def test_tensors_of_the_prediction_layer():
    """Layer 61: the projection takes the embedding first, then the hidden state; an ordinary MoE layer follows."""
    shapes = prediction(V3, 61)
    assert shapes["model.layers.61.eh_proj.weight"].shape == (7168, 14336)
    assert {name.split(".")[3] for name in shapes} == {
        "enorm",
        "hnorm",
        "eh_proj",
        "shared_head",
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn",
        "mlp",
    }
    assert "model.layers.61.mlp.experts.255.down_proj.weight" in shapes
    module = mtp_avals(V3, StepShape(ranks=8, tokens=4, requests=4))
    assert [half.shape for half in module.eh_proj] == [(896, 7168)] * 2


def test_prediction_takes_the_next_token_and_none_at_position_0():
    request = Request(number=0, prompt=(11, 12, 13, 14), max_new_tokens=4)
    assert list(_settled(Served(request, 0, 3, 0, (0,), 8)).tokens) == [-1, 13, 14]
    assert list(_settled(Served(request, 1, 2, 0, (0,), 8)).tokens) == [13, 14]


def test_fp8_blocks_are_128_wide_wherever_the_weight_ends():
    """576 rows have 5 blocks, the last of 64, and not 5 equal ones of 115."""
    assert scale_shape((576, 7168)) == (5, 56)
    scale = torch.arange(1.0, 6.0).unsqueeze(1)
    ones = torch.ones(576, 1).to(torch.float8_e4m3fn)
    found = dequantize_fp8(ones, scale, dtype=torch.float32).squeeze(1)
    assert found.tolist() == [1.0 + row // 128 for row in range(576)]
