"""A layer's decode step against the same written by hand in torch and against transformers', over the same history."""

from collections.abc import Iterator

import pytest
import torch
from attrs import evolve

from mla_fx import MlaConfig, MoeConfig
from mla_fx.backends.cpu import products
from mla_fx.models import ModelConfig
from tests.benchmarks.layers import ByHand, Case, ours, theirs
from tests.benchmarks.table import BY_HAND, TRANSFORMERS, Point, agree, hold

#: By hand with weights in float32, packed, where bf16 ones cannot be: twice the memory.
WIDENED = "by hand, float32 weights"

MEDIUM = ModelConfig(
    attention=MlaConfig(
        hidden_size=2048,
        num_attention_heads=16,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    moe=MoeConfig(
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=1024,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
    num_hidden_layers=1,
    vocab_size=16,
    intermediate_size=16,
)
#: DeepSeek-V3's widths, with 16 of its 256 experts.
V3 = evolve(
    MEDIUM,
    attention=evolve(MEDIUM.attention, hidden_size=7168, num_attention_heads=128, q_lora_rank=1536),
    moe=evolve(MEDIUM.moe, n_routed_experts=16, num_experts_per_tok=8, moe_intermediate_size=2048),
)
SMALL = evolve(
    MEDIUM,
    attention=evolve(
        MEDIUM.attention,
        hidden_size=64,
        num_attention_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    ),
    moe=evolve(MEDIUM.moe, n_routed_experts=16, moe_intermediate_size=32),
)


def point(name: str, config: ModelConfig, requests: int, history: int, dtype: str = "bf16") -> Point:
    case = Case(config, requests, history, dtype)
    peers = {BY_HAND: ByHand(case), TRANSFORMERS: theirs(case)}
    if dtype == "bf16" and not products.has(torch.bfloat16):
        peers[WIDENED] = ByHand(case, widened=True)
    least = dict.fromkeys(peers, 1.0) | {TRANSFORMERS: 12.0 if history >= 8000 else 3.0}
    return Point(
        "layer",
        f"{name}, {dtype}, {requests} requests, {round(history / 1024)}k",
        ours(case),
        peers,
        bytes=case.bytes(),
        dtype=dtype,
        least=least,
    )


#: Requests and history of a row.
SIZES = ((1, 1000), (4, 1000), (1, 8000), (4, 8000))


def points(whole: bool = False) -> Iterator[Point]:
    """Of medium widths with little history, or all: with V3's 13 GB, and half an hour, which transformers takes."""
    for name, config in {"medium": MEDIUM, **({"V3, 16 experts": V3} if whole else {})}.items():
        for requests, history in SIZES if whole else SIZES[:2]:
            yield point(name, config, requests, history)


@pytest.mark.bench
@pytest.mark.parametrize(("requests", "history"), SIZES)
@pytest.mark.parametrize("name", ["medium", "V3, 16 experts"])
def test_faster_than_by_hand_and_transformers(name: str, requests: int, history: int) -> None:
    hold([point(name, MEDIUM if name == "medium" else V3, requests, history)])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_compute_the_same_layer(dtype: str) -> None:
    """With 3 requests of more than a block, in float32 to its roundings."""
    made = point("small", SMALL, 3, 70, dtype)
    agree(evolve(made, tolerance=1e-5 if dtype == "fp32" else 0.05))
