"""CPU rule of `ops.AllToAll`: the payload of `common.payload` is written in one call of the compiled library."""

from functools import cache
from typing import Final

import torch

from mla_fx.backends.common.all_to_all import receive, together
from mla_fx.backends.common.payload import lanes, pack
from mla_fx.backends.cpu import kernel
from mla_fx.backends.device import Run
from mla_fx.backends.table import Collective
from mla_fx.dtypes import wide
from mla_fx.effects import Group


def send(out: torch.Tensor, lse: torch.Tensor, *, run: Run, group: Group) -> torch.Tensor:
    """The payload of every rank, [W, E]; bytes are copied, so bits arrive as they were in any dtype."""
    if kernel.engine() is None or not (out.is_contiguous() and lse.is_contiguous()):
        return pack(out, lse, ranks=group.size)
    size, bounds = _layout(out.shape, out.dtype, group.size)
    payload = torch.empty(group.size, size, dtype=out.dtype)
    kernel.function("mla_fx_pack", "iiiiii")(((out,), (lse,), (payload,)), *bounds, torch.get_num_threads())
    return payload


@cache
def _layout(shape: tuple[int, int, int], dtype: torch.dtype, ranks: int) -> tuple[int, tuple[int, ...]]:
    """Lanes for a rank, and what the library is told: tokens, ranks, bytes of outputs, of LSEs, of all for a rank.

    Every step asks again, and of few tokens the copy takes no longer than a line of Python.
    """
    tokens, heads, latent = shape
    own = heads // ranks
    _, _, end = lanes(dtype, tokens * own, latent)
    return end, (tokens, ranks, own * latent * dtype.itemsize, own * wide(dtype).itemsize, end * dtype.itemsize)


rule: Final = Collective(send, receive, together)
