"""Ascend rule of `ops.WriteCache`: npu_scatter_pa_kv_cache, both caches in one call.

Rows whose slot is -1 are passed along: the operator's kernels skip negative
slots (ops-transformer), though its page allows none.  Selecting rows would need
their number on the host, which is a wait for the device.
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
    if slots.shape[0]:
        rows = [part.contiguous().unsqueeze(1) for part in (latent, k_rope)]
        caches = [part.unsqueeze(2) for part in (latent_cache, rope_cache)]
        torch.ops.npu.npu_scatter_pa_kv_cache(*rows, *caches, slots.contiguous(), cache_mode="Norm")
    return latent_cache, rope_cache
