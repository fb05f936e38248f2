"""CPU rule of `ops.AbsorbQuery`."""

from collections.abc import Sequence

from mla_fx.backends.cpu.kernel import Tensors
from mla_fx.backends.cpu.products import of_heads
from mla_fx.backends.device import Run


def several(q: Tensors, w_uk: Tensors, *, runs: Sequence[Run], rope: int) -> Sequence[Tensors]:
    """One matrix product a head, on the first P features of the head."""
    return (of_heads(q, w_uk),)
