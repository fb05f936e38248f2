"""Attention by the compiled kernel, for the rules of `ops.HistoryAttention` and `ops.CurrentAttention`.

Scores, softmax, accumulation and LSE are in float32, whatever the dtype.  The
cache is read where it lies, block by block; what lengths do not reach is not
read.  A row's bits depend on its request alone: not on what else is in the
batch, nor on the number of threads.
"""

import struct
from array import array
from collections.abc import Sequence
from typing import Any, Final

import torch

from mla_fx.backends.cpu import kernel

#: As `Call` in call.h. One packed argument: ctypes takes 2 us longer for 24.
_CALL: Final = struct.Struct("@i4P4qP2q2P5qf2Pi")


def serves(q_latent: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> bool:
    """Whether there is a kernel for these queries and keys: float64 is not its own, nor are features with gaps."""
    return (
        kernel.engine() is not None
        and q_latent.dtype in kernel.FORMATS
        and latent.stride(-1) == rope.stride(-1) == 1
        and q_latent.numel() > 0
    )


def history(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_lengths: Sequence[int],
    history_lengths: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, H, L] and LSE [T, H] in float32, as `ops.HistoryAttention` has them."""
    strides = (*latent_cache.stride()[:2], *rope_cache.stride()[:2])
    table = block_table if block_table.stride(-1) == 1 else block_table.contiguous()
    blocks = (table.data_ptr(), table.stride(0), latent_cache.shape[1])
    return _attend(q_latent, q_rope, latent_cache, rope_cache, strides, blocks, query_lengths, history_lengths, scale)


def current(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    query_lengths: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, H, L] and LSE [T, H] in float32, as `ops.CurrentAttention` has them."""
    strides = (0, latent.stride(0), 0, k_rope.stride(0))
    return _attend(q_latent, q_rope, latent, k_rope, strides, (0, 0, 0), query_lengths, None, scale)


def _attend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    strides: tuple[int, ...],
    blocks: tuple[Any, ...],
    queries: Sequence[int],
    keys: Sequence[int] | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_latent, q_rope = q_latent.contiguous(), q_rope.contiguous()
    tokens, heads, features = q_latent.shape
    out, lse = torch.empty_like(q_latent), q_latent.new_empty((tokens, heads), dtype=torch.float32)
    new, cached = array("q", queries), None if keys is None else array("q", keys)
    call = _CALL.pack(
        kernel.FORMATS[q_latent.dtype],
        *(q_latent.data_ptr(), q_rope.data_ptr(), latent.data_ptr(), rope.data_ptr(), *strides, *blocks),
        *(new.buffer_info()[0], 0 if cached is None else cached.buffer_info()[0]),
        *(len(new), tokens, heads, features, q_rope.shape[2], scale),
        *(out.data_ptr(), lse.data_ptr(), torch.get_num_threads()),
    )
    kernel.function("mla_fx_attend", "ip")(kernel.ENGINES[kernel.engine() or ""], call)
    return out, lse
