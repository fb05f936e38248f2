"""What goes around the exchange, packing before it and the merge behind, against plain torch code for the same."""

from collections.abc import Iterator

import pytest
import torch

from mla_fx.backends import cpu
from mla_fx.backends.device import HOST, Run
from mla_fx.effects import Group, ops
from tests.benchmarks.table import BY_HAND, Point, agree, hold

HEADS, LATENT = 128, 512
#: What packing takes where outputs and LSEs go in two messages instead of one.
TWO = "in two messages"


def packing(ranks: int, tokens: int) -> Point:
    """By hand: the same payload, put together by torch.

    In two messages: outputs and LSEs in order of the ranks, each in a tensor of its own; with one token these are
    views, and nothing is copied.
    """
    out, lse = torch.randn(tokens, HEADS, LATENT).bfloat16(), torch.randn(tokens, HEADS)
    send, run, group = cpu.TABLE.rules[ops.AllToAll].send, Run(0, HOST), Group("dcp", ranks)

    def ours() -> torch.Tensor:
        return send(out, lse, run=run, group=group)

    def in_order() -> list[torch.Tensor]:
        return [one.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous() for one in (out, lse)]

    def by_hand() -> torch.Tensor:
        return torch.cat([one.view(ranks, -1).view(out.dtype) for one in in_order()], 1)

    # As integers: half of an LSE may be no number.  In time they are nobody's results.
    assert torch.equal(ours().view(torch.int16), by_hand().view(torch.int16))
    return Point(
        "exchange",
        f"packing, bf16, {HEADS} heads, {ranks} ranks, {tokens} tokens",
        lambda: done(ours()),
        {BY_HAND: lambda: done(by_hand()), TWO: lambda: done(in_order())},
        bytes=2 * (out.nbytes + lse.nbytes),
        least={BY_HAND: 1.0},
    )


def done(result: object) -> None:
    """A result that is not compared."""


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
    return Point(
        "exchange",
        name,
        lambda: rule(*given, run=run, flat=False),
        {BY_HAND: by_hand},
        bytes=moved,
        least={BY_HAND: 1.0},
    )


def points(whole: bool = False) -> Iterator[Point]:
    for ranks, tokens in (
        ((2, 1), (8, 1), (8, 16), (8, 64)) if not whole else ((w, t) for w in (2, 8, 16) for t in (1, 4, 16, 64))
    ):
        yield packing(ranks, tokens)
        yield merge(ranks, tokens)


def test_all_compute_the_same():
    for made in (packing, merge):
        for tokens in (1, 3):
            agree(made(4, tokens))


@pytest.mark.bench
def test_no_slower_than_by_hand():
    hold(points(whole=True))
