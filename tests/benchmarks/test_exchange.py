"""What goes around the exchange, packing before it and the merge behind, against plain torch code for the same."""

from collections.abc import Iterator

import torch

from mla_fx.backends import cpu
from mla_fx.backends.common import payload
from mla_fx.backends.device import HOST, Run
from mla_fx.effects import ops
from tests.benchmarks.table import BY_HAND, Point, agree

HEADS, LATENT = 128, 512


def packing(ranks: int, tokens: int) -> Point:
    """By hand: outputs and LSEs in order of the ranks, each in a tensor of its own, as two messages would take them."""
    out, lse = torch.randn(tokens, HEADS, LATENT).bfloat16(), torch.randn(tokens, HEADS)

    def ours() -> None:
        payload.pack(out, lse, ranks=ranks)  # in a layout of its own, which is held against the parts once

    def by_hand() -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(one.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous() for one in (out, lse))

    parts = payload.unpack(payload.pack(out, lse, ranks=ranks), (tokens, HEADS // ranks, LATENT))
    for one, other in zip(parts, by_hand(), strict=True):
        assert torch.equal(one, other)
    name = f"packing, bf16, {HEADS} heads, {ranks} ranks, {tokens} tokens"
    return Point("exchange", name, ours, {BY_HAND: by_hand}, bytes=2 * (out.nbytes + lse.nbytes))


def merge(ranks: int, tokens: int) -> Point:
    """By hand: all parts in one tensor of float32, times the softmax of their LSEs, and added up."""
    heads = HEADS // ranks
    parts = torch.randn(ranks + 1, tokens, heads, LATENT).bfloat16()
    lse = torch.randn(ranks + 1, tokens, heads)
    given = (parts[:-1].clone(), lse[:-1].clone(), parts[-1].clone(), lse[-1].clone())
    run, rule = Run(0, HOST), cpu.TABLE.rules[ops.Combine]

    def by_hand() -> torch.Tensor:
        recv, recv_lse, local, local_lse = given
        weights = torch.softmax(torch.cat((recv_lse, local_lse[None])), 0)
        return (torch.cat((recv, local[None])).float() * weights[..., None]).sum(0).to(local.dtype)

    name = f"merge, bf16, {heads} heads, {ranks} ranks and its own, {tokens} tokens"
    moved = parts.nbytes + lse.nbytes + parts[0].nbytes
    return Point("exchange", name, lambda: rule(*given, run=run, flat=False), {BY_HAND: by_hand}, bytes=moved)


def points(whole: bool = False) -> Iterator[Point]:
    for ranks, tokens in (
        ((2, 1), (8, 1), (8, 16), (8, 64)) if not whole else ((w, t) for w in (2, 8, 16) for t in (1, 4, 16, 64))
    ):
        yield packing(ranks, tokens)
        yield merge(ranks, tokens)


def test_all_compute_the_same():
    for made in (packing, merge):
        agree(made(4, 3))
