"""CPU rule of `ops.AbsorbQuery`."""

from collections.abc import Sequence
from typing import Final

from mla_fx.backends.cpu.kernel import Tensors
from mla_fx.backends.cpu.products import of_heads
from mla_fx.backends.cpu.together import alone
from mla_fx.backends.device import Run


def several(q: Tensors, w_uk: Tensors, *, runs: Sequence[Run], rope: int) -> Sequence[Tensors]:
    """One matrix product a head, on the first P features of the head."""
    heads, nope, _ = w_uk[0].shape
    return (of_heads([one.view(one.shape[0], heads, nope + rope)[..., :nope] for one in q], w_uk),)


rule: Final = alone(several)
