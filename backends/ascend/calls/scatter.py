"""New rows into paged caches: npu_scatter_pa_kv_cache, which writes two caches with the same slots in one call.

The operator takes 16 and 8 bits only; rows of float32 are passed as twice as
many features of bfloat16, whose bits it copies as they are.  Rows whose slot is
-1 are passed along: its kernels skip negative slots (ops-transformer), though
its page allows none.  Selecting rows would need their number on the host, which
is a wait for the device.  Rows that are skipped count too where it refuses more
rows than the caches have, so that many go into a call at most.
"""

import torch

from mla_fx.backends.ascend.calls.dtypes import wrong_dtype
from mla_fx.effects import Aval


def takes(name: str, cache: Aval) -> str | None:
    """Why the operator cannot write a cache [C, S, F]."""
    if why := wrong_dtype(name, cache):
        return why
    return None if all(cache.shape) else f"{name}: on ascend must have a block, a row and a feature: got {cache}"


def scatter(
    caches: tuple[torch.Tensor, torch.Tensor], rows: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
) -> None:
    """Write rows [T, F] into caches [C, S, F], in place.  "Norm": caches as [C, S, heads = 1, features]."""
    if not slots.shape[0]:
        return  # an empty tensor may have strides that nothing can be viewed by
    stored = [_bits(cache).unsqueeze(2) for cache in caches]
    new = [_bits(part.contiguous()).unsqueeze(1) for part in rows]
    slots = slots.contiguous()
    room = caches[0].shape[0] * caches[0].shape[1]
    for start in range(0, slots.shape[0], room):
        some = slice(start, start + room)
        torch.ops.npu.npu_scatter_pa_kv_cache(*(part[some] for part in new), *stored, slots[some], cache_mode="Norm")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.float32 else tensor
