"""CPU rule of `ops.VUp`."""

from collections.abc import Sequence

from mla_fx.backends.common.local_heads import own_heads
from mla_fx.backends.cpu.kernel import Tensors
from mla_fx.backends.cpu.products import of_heads
from mla_fx.backends.device import Run
from mla_fx.effects import Group


def several(
    attn: Tensors,
    w_uv: Tensors,
    *,
    runs: Sequence[Run],
    group: Group | None,
    flat: bool,
) -> Sequence[Tensors]:
    """One matrix product a head, then heads side by side."""
    heads = attn[0].shape[1]
    if len(w_uv[0]) != heads:
        w_uv = [own_heads(one, heads, 0, run) for one, run in zip(w_uv, runs, strict=True)]
    return (of_heads(attn, w_uv, flat=flat),)
