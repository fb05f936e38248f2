"""Ascend rule of `ops.WriteCache`: npu_scatter_pa_kv_cache, both caches in one call.

The operator takes 16 and 8 bits only; rows of float32 are passed as twice as
many of bfloat16, whose bits it copies as they are.  Rows whose slot is -1 are
passed along: its kernels skip negative slots (ops-transformer), though its
page allows none.  Selecting rows would need their number on the host, which is
a wait for the device.  Rows that are skipped count too where it refuses more
rows than the caches have, so that many go into a call at most.
"""

import torch


def rule(
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the rows whose slot is not -1, in place.  "Norm": caches as [C, S, heads = 1, features]."""
    if not slots.shape[0]:
        return latent_cache, rope_cache
    rows = [_bits(part.contiguous()).unsqueeze(1) for part in (latent, k_rope)]
    caches = [_bits(part).unsqueeze(2) for part in (latent_cache, rope_cache)]
    slots = slots.contiguous()
    room = latent_cache.shape[0] * latent_cache.shape[1]
    for start in range(0, slots.shape[0], room):
        part = slice(start, start + room)
        torch.ops.npu.npu_scatter_pa_kv_cache(*(row[part] for row in rows), *caches, slots[part], cache_mode="Norm")
    return latent_cache, rope_cache


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.float32 else tensor
