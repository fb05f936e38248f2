"""MLA decode under context parallelism as a serving system on Ascend writes it, over the emulated CANN.

Not our rules: one process plays the ranks one after the other.  Every rank has its own positions of the history in a
paged cache of four axes, and attends with the gathered heads in BNSD; several new tokens of a request see each other
by a mask of three axes, in BSND.  Outputs and LSEs are joined in float32, exchanged head by head, merged by
npu_attention_update and multiplied by W_UV.  Positions are dealt out to the ranks one by one.
"""

import pytest
import torch

from tests.backends.ascend.conftest import random

pytestmark = pytest.mark.usefixtures("emulator")
RANKS, HEADS, LATENT, ROPE, VALUE, SIZE, COLUMNS = 4, 8, 512, 64, 128, 16, 2
SCALE = 0.05
npu = torch.ops.npu


def shards(rows: torch.Tensor) -> list[torch.Tensor]:
    """[B, P, D] -> what each rank has of it, paged [B * COLUMNS, 1, SIZE, D], zeros behind."""
    found = []
    for rank in range(RANKS):
        mine = rows[:, rank::RANKS]
        room = rows.new_zeros(rows.shape[0], COLUMNS * SIZE, rows.shape[2])
        room[:, : mine.shape[1]] = mine
        found.append(room.view(-1, 1, SIZE, rows.shape[2]).npu())
    return found


def local(length: int, rank: int) -> int:
    """How many of the first `length` positions are a rank's."""
    return len(range(rank, length, RANKS))


def attend(layout: str, query: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, k_rope: torch.Tensor, **how):
    batch = query.shape[0]
    table = torch.arange(batch * COLUMNS, dtype=torch.int32).view(batch, COLUMNS).npu()
    return npu.npu_fused_infer_attention_score(
        query,
        cache,
        cache,
        query_rope=rope,
        key_rope=k_rope,
        num_heads=HEADS,
        num_key_value_heads=1,
        input_layout=layout,
        scale=SCALE,
        block_table=table,
        block_size=SIZE,
        softmax_lse_flag=True,
        **how,
    )


def exchange_and_merge(partial: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Outputs [T, N, D] and LSEs [T, N, 1] of every rank -> all heads merged [T, N, D], each rank merging its own."""
    each = [torch.cat((out.float(), lse), -1).permute(1, 2, 0).contiguous() for out, lse in partial]  # [N, D + 1, T]
    heads, merged = HEADS // RANKS, []
    for rank in range(RANKS):
        received = torch.stack([sent.view(RANKS, heads, LATENT + 1, -1)[rank] for sent in each])
        rows = received.permute(0, 3, 1, 2)  # [W, T, N / W, D + 1]
        parts = [part[..., :LATENT].reshape(-1, LATENT) for part in rows]
        lse = [part[..., LATENT].reshape(-1) for part in rows]
        merged.append(npu.npu_attention_update(lse, parts, 0)[0].view(-1, heads, LATENT))
    return torch.cat(merged, 1)


def exact(query, query_rope, latent, rope, lengths, w_uv) -> torch.Tensor:
    """By the definition: [B, S, N, D] over the first `lengths[b][s]` positions."""
    found = []
    for b, of_request in enumerate(lengths):
        for s, length in enumerate(of_request):
            c, k = latent[b, :length].double(), rope[b, :length].double()
            scores = (query[b, s].double() @ c.t() + query_rope[b, s].double() @ k.t()) * SCALE
            found.append(torch.einsum("nl,nlv->nv", torch.softmax(scores, -1) @ c, w_uv.double()))
    return torch.stack(found)


def inputs(rng, queries: int, longest: int):
    batch = 3
    query, query_rope = (random(rng, batch, queries, HEADS, size, dtype=torch.bfloat16) for size in (LATENT, ROPE))
    latent, rope = (random(rng, batch, longest, size, dtype=torch.bfloat16) for size in (LATENT, ROPE))
    return query, query_rope, latent, rope, random(rng, HEADS, LATENT, VALUE, dtype=torch.bfloat16)


def v_up(merged: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    return npu.npu_transpose_batchmatmul(merged.to(torch.bfloat16), w_uv.npu(), perm_x1=(1, 0, 2)).cpu()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.double() - want).norm() / want.norm()
    assert error < 2**-7, error


def test_one_token_a_request(rng, release):
    """The last request has two positions, so that two ranks have none of it."""
    query, query_rope, latent, rope, w_uv = inputs(rng, 1, 57)
    lengths = [57, 20, 2]
    partial = []
    for rank, (cache, k_rope) in enumerate(zip(shards(latent), shards(rope), strict=True)):
        seen = [local(length, rank) for length in lengths]
        first, second = (part.transpose(1, 2).contiguous().npu() for part in (query, query_rope))
        out, lse = attend("BNSD", first, second, cache, k_rope, actual_seq_lengths_kv=seen)
        partial.append((out[:, :, 0], lse[:, :, 0]))
    merged = exchange_and_merge(partial)
    close(v_up(merged, w_uv), exact(query, query_rope, latent, rope, [[n] for n in lengths], w_uv))


def test_speculated_tokens_by_a_mask(rng, release):
    """Three tokens a request: a rank's mask lets the i-th see what the rank has of its past.

    Where a rank has none of it, the row is a plain average with LSE -1e12, which weighs nothing beside a real one.
    """
    query, query_rope, latent, rope, w_uv = inputs(rng, 3, 57)
    lengths = [[55, 56, 57], [18, 19, 20], [1, 2, 3]]
    partial = []
    for rank, (cache, k_rope) in enumerate(zip(shards(latent), shards(rope), strict=True)):
        hidden = torch.ones(3, 3, COLUMNS * SIZE, dtype=torch.bool)
        for b, of_request in enumerate(lengths):
            for s, length in enumerate(of_request):
                hidden[b, s, : local(length, rank)] = False
        seen = [local(of_request[-1], rank) for of_request in lengths]
        out, lse = attend(
            "BSND",
            query.npu(),
            query_rope.npu(),
            cache,
            k_rope,
            actual_seq_lengths_kv=seen,
            atten_mask=hidden.npu(),
        )
        partial.append((out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)))
    merged = exchange_and_merge(partial)
    close(v_up(merged, w_uv), exact(query, query_rope, latent, rope, lengths, w_uv))
