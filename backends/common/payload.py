"""The exchange payload: what a rank sends to another, outputs first and the bits of their LSEs behind them.

    payload[r] = [ out of the heads of rank r: T * N * L | gap | their LSEs: T * N ]

in lanes of the output's dtype, of which an LSE takes two beside bf16 and fp16
and one beside fp32 and fp64.  The gap is the one lane, where there is one, that
makes the LSEs begin at a whole one.  So what comes from a rank is outputs in
one piece and LSEs in one piece: they are read where they have arrived.  The
bits pass through integer views only, never through arithmetic, so every pattern
arrives as it was: infinities, NaN payloads, values beyond 65504.
"""

from functools import cache

import torch

from mla_fx.dtypes import wide

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def pack(out: torch.Tensor, lse: torch.Tensor, *, ranks: int) -> torch.Tensor:
    """Split heads over `ranks`, and put a rank's LSEs behind its outputs.

    `out` [T, H, L], `lse` [T, H] float32 (float64 beside float64) -> [W, E], contiguous.
    """
    tokens, heads, latent = out.shape
    own, bits = heads // ranks, _BITS[lse.dtype]
    payload = room(out, ranks=ranks)
    count, start, _ = lanes(out.dtype, tokens * own, latent)
    if tokens:
        outs = payload[:, :count].view(ranks, tokens, own, latent)
        outs.copy_(out.view(tokens, ranks, own, latent).transpose(0, 1))
        lses = payload[:, start:].view(bits).view(ranks, tokens, own)
        lses.copy_(lse.view(bits).view(tokens, ranks, own).transpose(0, 1))
    return payload


def room(out: torch.Tensor, *, ranks: int) -> torch.Tensor:
    """A payload [W, E] for `out` [T, H, L] and its LSEs, not yet written; `unpack` gives its parts."""
    tokens, heads, latent = out.shape
    _, _, end = lanes(out.dtype, tokens * heads // ranks, latent)
    return out.new_empty((ranks, end))


def unpack(payload: torch.Tensor, shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [W, T, N, L] and the LSEs [W, T, N], float32 (float64 beside float64), where they lie in [W, E].

    `shape` is T, N and L.  What is of one rank lies in one piece; between ranks there are gaps.
    """
    ranks, (tokens, own, latent) = payload.shape[0], shape
    kind = wide(payload.dtype)
    if not tokens:
        return payload.new_empty((ranks, *shape)), payload.new_empty((ranks, tokens, own), dtype=kind)
    count, start, _ = lanes(payload.dtype, tokens * own, latent)
    outs = payload[:, :count].view(ranks, *shape)
    return outs, payload[:, start:].view(kind).view(ranks, tokens, own)


@cache
def lanes(dtype: torch.dtype, rows: int, latent: int) -> tuple[int, int, int]:
    """Where the outputs of `rows` heads end, where their LSEs start, and where these end."""
    wide_lanes = wide(dtype).itemsize // dtype.itemsize
    count = rows * latent
    start = -(-count // wide_lanes) * wide_lanes
    return count, start, start + rows * wide_lanes
