"""CPU rule of `ops.GroupedLinear`: all experts that have rows, in one call where the kernel does it."""

from collections.abc import Sequence

from mla_fx.backends.cpu.kernel import Tensors
from mla_fx.backends.cpu.products import grouped
from mla_fx.backends.device import Run
from mla_fx.backends.table import Formed


def several(rows: Tensors, weight: Sequence[Formed], counts: Tensors, *, runs: Sequence[Run]) -> Sequence[Tensors]:
    """Weights as `products.packed` has them; rows behind the last count are left as they come."""
    return (grouped(rows, weight, counts),)
