"""The table of weights where groups differ: heads and columns are shared out by one, experts by another.

That the parts of one group are the file again, element by element, is held in `tests/models/test_load.py`.
"""

import pytest
import torch
from attrs import evolve

from mla_fx import MlaConfig, MoeConfig
from mla_fx.effects import Aval, Group, InputError
from mla_fx.parameters import Quantized
from mla_fx.weights import Share, Shares, attention_weights, avals, moe_weights, named, shard_attention, shares

ATTENTION = MlaConfig(
    hidden_size=24,
    num_attention_heads=6,
    kv_lora_rank=8,
    qk_nope_head_dim=5,
    qk_rope_head_dim=4,
    v_head_dim=3,
)
MOE = MoeConfig(n_routed_experts=10, num_experts_per_tok=2, moe_intermediate_size=7, n_shared_experts=1)


def of(tp: tuple[int, int], ep: tuple[int, int]) -> Shares:
    return {
        name: Share(rank, Group(name, size)) for name, (rank, size) in {"tp": tp, "contexts": (0, 1), "ep": ep}.items()
    }


def test_experts_go_by_their_group_and_columns_by_theirs():
    found = avals(moe_weights(MOE, 24), of((0, 2), (0, 4)), dtype="bf16")
    assert found.gate == Aval((10, 24), "bf16") and found.e_score_correction_bias == Aval((10,), "fp32")
    assert found.gate_up_proj.shape == (3, 14, 24) and found.down_proj.shape == (3, 24, 7)
    assert found.shared_experts.gate_up_proj.shape == (8, 24) and found.shared_experts.down_proj.shape == (24, 4)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 4), (4, 2), (1, 3), (12, 1)])
def test_the_parts_of_each_group_are_every_tensor_once(tp, ep):
    """Expert for expert over the ranks of "ep", column for column over those of "tp"."""
    weights = moe_weights(MOE, 24)
    seen = {name: torch.zeros(weight.shape, dtype=torch.int64) for name, weight in named(weights).items()}
    for weight in (weights.gate_up_proj, weights.down_proj):
        for rank in range(ep):
            for place in weight.places(of((tp - 1, tp), (rank, ep))):
                seen[place.name][place.rows or slice(None), place.columns or slice(None)] += 1
    for weight in weights.shared_experts:
        for rank in range(tp):
            for place in weight.places(of((rank, tp), (ep - 1, ep))):
                seen[place.name][place.rows or slice(None), place.columns or slice(None)] += 1
    assert len(seen) == 2 + 3 * 10 + 3
    for name, count in seen.items():
        assert (count == (0 if "gate." in name else 1)).all(), name


def test_8_bits_are_for_projections():
    found = avals(attention_weights(ATTENTION), shares(1, 2), dtype="fp64", quantization="w8a8")
    assert found.query.q_proj == Quantized(Aval((27, 24), "int8"), Aval((27,), "fp64"))
    assert found.o_proj == Quantized(Aval((24, 9), "int8"), Aval((24,), "fp64"))
    assert found.w_uk == Aval((3, 5, 8), "fp64") and found.w_uv == Aval((3, 8, 3), "fp64")
    assert found.kv_a_layernorm == Aval((8,), "fp64")


def test_all_heads_of_the_query_and_own_values():
    found = avals(attention_weights(ATTENTION, replicate_query=True), shares(1, 3), dtype="bf16")
    assert found.query.q_proj.shape == (54, 24) and found.w_uk.shape == (6, 5, 8)
    assert found.w_uv.shape == (2, 8, 3) and found.o_proj.shape == (24, 6)


def test_heads_are_not_padded():
    for ranks in (4, 5, 12):
        with pytest.raises(InputError, match=f"num_attention_heads: must be a multiple of the ranks, {ranks}: got 6"):
            avals(attention_weights(ATTENTION), shares(0, ranks), dtype="bf16")


def test_absorbed_halves_element_by_element():
    """w_uk[n, p, l] = kv_b_proj[n (P + V) + p, l] and w_uv[n, l, v] = kv_b_proj[n (P + V) + P + v, l]."""
    tensors = {name: torch.randn(each.shape) for name, each in named(attention_weights(ATTENTION)).items()}
    kv_b, kept = tensors["kv_b_proj.weight"], tensors["o_proj.weight"].clone()
    for rank in range(3):
        own = shard_attention(tensors, ATTENTION, rank=rank, ranks=3)
        for n in range(2):
            head = (rank * 2 + n) * 8
            assert all(torch.equal(own.w_uk[n, p], kv_b[head + p]) for p in range(5))
            assert all(torch.equal(own.w_uv[n, :, v], kv_b[head + 5 + v]) for v in range(3))
        own.o_proj.zero_()
    assert torch.equal(tensors["o_proj.weight"], kept), "a rank's part is its own"


def test_tensors_without_a_correction():
    greedy = evolve(MOE, topk_method="greedy", scoring_func="softmax", norm_topk_prob=False, n_shared_experts=0)
    weights = moe_weights(greedy, 24)
    assert not weights.e_score_correction_bias.names and not list(weights.e_score_correction_bias.places(shares(0, 1)))
    assert set(named(weights)) == {"gate.weight"} | {
        f"experts.{x}.{name}_proj.weight" for x in range(10) for name in ("gate", "up", "down")
    }
