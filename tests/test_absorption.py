"""The absorbed layer, sharded and paged, is the plain one: keys and values expanded per head, nothing cached.

The oracle is MLA as its definition has it, in float64, with k_nope and v made
from the latent by `kv_b_proj`, and pairs rotated as complex numbers.
"""

import pytest
import torch

from mla_fx import backends, orchestrations
from mla_fx.config import MlaConfig
from mla_fx.effects import schedule
from mla_fx.rope import frequencies
from mla_fx.weights import random_attention, shard_attention
from tests.setups import CONFIG, Setup


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight


def rotate(x: torch.Tensor, config: MlaConfig) -> torch.Tensor:
    """[S, heads, R] by position, pairs as complex numbers; left interleaved, as scores do not mind."""
    angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * torch.tensor(
        frequencies(config), dtype=torch.float64
    )
    magnitude = config.yarn.angle_magnitude if config.yarn else 1.0
    turns = torch.polar(torch.full_like(angles, magnitude), angles)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)


def plain_mla(x: torch.Tensor, full: dict[str, torch.Tensor], config: MlaConfig) -> torch.Tensor:
    """Causal multi-head attention over one sequence [S, D] with expanded keys and values."""
    c, length, heads = config, x.shape[0], config.num_attention_heads
    w = {name.removesuffix(".weight"): tensor for name, tensor in full.items()}
    if c.q_lora_rank is not None:
        q = norm(x @ w["q_a_proj"].T, w["q_a_layernorm"]) @ w["q_b_proj"].T
    else:
        q = x @ w["q_proj"].T
    q_nope, q_rope = q.view(length, heads, -1).split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
    compressed, k_rope = (x @ w["kv_a_proj_with_mqa"].T).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
    kv = (norm(compressed, w["kv_a_layernorm"]) @ w["kv_b_proj"].T).view(length, heads, -1)
    k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
    q = torch.cat([q_nope, rotate(q_rope, c)], dim=-1)
    k = torch.cat([k_nope, rotate(k_rope[:, None], c).expand(-1, heads, -1)], dim=-1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * c.softmax_scale
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hij,jhv->ihv", scores.softmax(-1), v).flatten(1) @ w["o_proj"].T


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("lora", [12, None])
@pytest.mark.parametrize("yarn", [CONFIG.yarn, None], ids=["yarn", "plain"])
@pytest.mark.parametrize("replicate_query", [False, True])
def test_absorbed_equals_plain(ranks, lora, yarn, replicate_query):
    config = MlaConfig(
        hidden_size=24,
        num_attention_heads=8,
        q_lora_rank=lora,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        yarn=yarn,
    )
    setup = Setup(ranks=ranks, dtype="fp64", tokens=7, config=config, replicate_query=replicate_query)
    generator = torch.Generator().manual_seed(5)
    full = random_attention(config, generator=generator, dtype=torch.float64)
    sequences = [torch.randn(13, 24, generator=generator, dtype=torch.float64) for _ in range(2)]
    params = [shard_attention(full, config, rank=r, ranks=ranks, replicate_query=replicate_query) for r in range(ranks)]
    made = backends.get("reference", ranks=ranks)
    program = schedule(setup.step, orchestrations.exchange_aside)
    run = made.compile(program, made.prepare(program, params))
    caches, done, found = setup.caches(), [0, 0], [[], []]
    for query in ((4, 3), (1, 1), (6, 1), (2, 5), (0, 3)):
        rows = torch.cat([x[d : d + n] for x, d, n in zip(sequences, done, query, strict=True)])
        hidden = torch.cat([rows, torch.ones(7 - len(rows), 24, dtype=torch.float64)])
        out, caches = run(caches, [hidden] * ranks, setup.batches(tuple(done), query))
        for b, part in enumerate(out[0][: len(rows)].split(list(query))):
            found[b].append(part)
        done = [d + n for d, n in zip(done, query, strict=True)]
    assert done == [13, 13]
    for parts, x in zip(found, sequences, strict=True):
        torch.testing.assert_close(torch.cat(parts), plain_mla(x, full, config), rtol=1e-12, atol=1e-12)
