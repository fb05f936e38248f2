"""The two kernels around the exchange, in Triton: what is sent is laid out by one launch, and merged by one.

Written in what Triton and triton-ascend 3.2 have in common: contiguous blocks,
loops of constant length, masks that are one comparison, integers for bits.
Importing this needs the package `triton`, which either of them installs.
"""

import triton
import triton.language as tl


@triton.jit
def pack(
    out: tl.tensor,
    lse: tl.tensor,
    outs: tl.tensor,
    lses: tl.tensor,
    pairs: tl.tensor,
    stride: tl.tensor,
    lse_stride: tl.tensor,
    RANKS: tl.constexpr,
    OWN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN_BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
) -> None:
    """For each token and each rank (`pairs` of them): its OWN heads' WIDTH lanes and their LSEs, in one piece each.

    All are integers of the size of what they hold.  From rank to rank in `outs` it is `stride`, in `lses` `lse_stride`.
    """
    for turn in range(TURNS):
        pair = (tl.program_id(0) + turn * tl.num_programs(0)).to(tl.int64)
        token, rank = pair // RANKS, pair % RANKS  # and so they lie in `out`: token by token, in it rank by rank
        for start in range(0, WIDTH, BLOCK):
            lane = start + tl.arange(0, BLOCK)
            inside = lane < tl.where(pair < pairs, WIDTH, 0)
            found = tl.load(out + pair * WIDTH + lane, mask=inside)
            tl.store(outs + rank * stride + token * WIDTH + lane, found, mask=inside)
        head = tl.arange(0, OWN_BLOCK)
        inside = head < tl.where(pair < pairs, OWN, 0)
        found = tl.load(lse + pair * OWN + head, mask=inside)
        tl.store(lses + rank * lse_stride + token * OWN + head, found, mask=inside)


@triton.jit
def merge(
    recv: tl.tensor,
    recv_lse: tl.tensor,
    local: tl.tensor,
    local_lse: tl.tensor,
    merged: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    lse_stride: tl.tensor,
    RANKS: tl.constexpr,
    LATENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
) -> None:
    """For each of `rows` rows of LATENT features: all parts in one softmax over their LSEs, see `ops.Combine`.

    From rank to rank in `recv` it is `stride`, in `recv_lse` `lse_stride`; all else is contiguous.  In the LSEs' dtype.
    """
    infinity = float("inf")
    for turn in range(TURNS):
        first = (tl.program_id(0) + turn * tl.num_programs(0)).to(tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)
        here = row < rows
        feature = tl.arange(0, BLOCK)
        inside = feature[None, :] < tl.where(here, LATENT, 0)[:, None]
        place = first * LATENT + (tl.arange(0, ROWS)[:, None] * LATENT + feature[None, :])
        own = tl.load(local_lse + row, mask=here, other=0.0)
        most = tl.where(tl.abs(own) == infinity, -infinity, own)
        theirs = recv_lse
        for _ in range(RANKS):
            x = tl.load(theirs + row, mask=here, other=0.0)
            most = tl.maximum(most, tl.where(tl.abs(x) == infinity, -infinity, x))
            theirs += lse_stride
        most = tl.where(most == -infinity, 0.0, most)
        # A part that saw no key is selected away, since 0 * NaN is NaN.
        total = tl.where(tl.abs(own) == infinity, 0.0, tl.exp(own - most))
        part = tl.load(local + place, mask=inside).to(own.dtype)
        sums = total[:, None] * tl.where((tl.abs(own) == infinity)[:, None], 0.0, part)
        parts, theirs = recv, recv_lse
        for _ in range(RANKS):
            x = tl.load(theirs + row, mask=here, other=0.0)
            weight = tl.where(tl.abs(x) == infinity, 0.0, tl.exp(x - most))
            part = tl.load(parts + place, mask=inside).to(own.dtype)
            sums += weight[:, None] * tl.where((tl.abs(x) == infinity)[:, None], 0.0, part)
            total += weight
            parts += stride
            theirs += lse_stride
        mean = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(merged + place, mean.to(merged.dtype.element_ty), mask=inside)
