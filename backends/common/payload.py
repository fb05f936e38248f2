"""The exchange payload: an attention output and its LSE in one tensor of the output's dtype.

    payload[..., :L] = out          payload[..., L:] = the bits of the LSE

beside bf16 and fp16 two 16-bit lanes, low half first; beside fp32 and fp64 one
lane.  The bits pass through integer views only, never through arithmetic, so
every pattern arrives as it was: infinities, NaN payloads, values beyond 65504.
"""

import torch

from mla_fx.dtypes import wide

_BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def pack(out: torch.Tensor, lse: torch.Tensor, *, ranks: int) -> torch.Tensor:
    """Split heads over `ranks` and put the LSE beside the output.

    `out` [T, H, L], `lse` [T, H] float32 (float64 beside float64) -> [W, T, N, E], contiguous.
    """
    tokens, heads, latent = out.shape
    bits = _BITS[out.dtype]
    lanes = lse.unsqueeze(-1).view(bits).shape[-1]
    payload = out.new_empty((ranks, tokens, heads // ranks, latent + lanes))
    payload[..., :latent] = out.view(tokens, ranks, heads // ranks, latent).transpose(0, 1)
    packed = lse.contiguous().unsqueeze(-1).view(bits)
    payload.view(bits)[..., latent:] = packed.view(tokens, ranks, heads // ranks, lanes).transpose(0, 1)
    return payload


def unpack(payload: torch.Tensor, *, latent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [..., L] and the LSE [...], float32 (float64 beside float64), each contiguous and on its own."""
    bits = payload.view(_BITS[payload.dtype])
    out = bits[..., :latent].clone(memory_format=torch.contiguous_format).view(payload.dtype)
    lanes = bits[..., latent:].clone(memory_format=torch.contiguous_format)
    return out, lanes.view(wide(payload.dtype)).squeeze(-1)
