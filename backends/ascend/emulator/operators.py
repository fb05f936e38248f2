"""The table of emulated operators, by the names under which the wheel looks them up.

An operator that is not in the table is refused by the wheel itself, which
names it; `Machine.operator` adds one.
"""

from collections.abc import Mapping

from mla_fx.backends.ascend.emulator import (
    attention,
    everyday,
    experts,
    finalize,
    fractal,
    grouped,
    merge,
    pointwise,
    product,
    quant,
    residual,
    rotary,
    rows,
    swiglu_quant,
)
from mla_fx.backends.ascend.emulator.operator import Operator
from mla_fx.backends.ascend.emulator.releases import Release


def operators(release: Release) -> Mapping[str, Operator]:
    """Name to operator, as that release has it; names and signatures are the same in all."""
    return {
        **pointwise.OPERATORS,
        **everyday.OPERATORS,
        **rows.OPERATORS,
        **residual.OPERATORS,
        **rotary.OPERATORS,
        **fractal.OPERATORS,
        **grouped.OPERATORS,
        **quant.OPERATORS,
        **finalize.OPERATORS,
        **swiglu_quant.OPERATORS,
        **attention.OPERATORS,
        **merge.operators(release),
        **product.operators(release),
        **experts.operators(release),
    }
