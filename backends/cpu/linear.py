"""CPU rule of `ops.Linear`."""

from collections.abc import Sequence

from mla_fx.backends.cpu.kernel import Tensors
from mla_fx.backends.cpu.products import linears
from mla_fx.backends.device import Run


def several(x: Tensors, weight: Tensors, *, runs: Sequence[Run]) -> Sequence[Tensors]:
    """`x` [T, D] times `weight` [F, D] transposed, kept as `products.packed` has it."""
    return (linears(x, weight),)
