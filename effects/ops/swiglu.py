"""The gated activation of a feed-forward network.

    out[t, f] = silu(x[t, f]) * x[t, F + f]          silu(a) = a / (1 + exp(-a))

`x` is what the merged gate and up projection gives, gate first.  Source: GLU
variants (arXiv 2002.05202), as in DeepSeek-V3's `down_proj(silu(gate) * up)`.
"""

from collections.abc import Mapping
from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import Aval, ShapeError
from mla_fx.effects.op import Op


@frozen
class Swiglu(Op):
    """`x` [T, 2 F] -> [T, F]."""

    operands: ClassVar = {"x": "T D"}

    def shape_rule(self, axes: Mapping[str, int], dtype: str) -> tuple[Aval, ...]:
        """Two halves of one width."""
        if axes["D"] % 2:
            raise ShapeError(f"{self.name}: axis D of x must be even, gate and up: got {axes['D']}")
        return (Aval((axes["T"], axes["D"] // 2), dtype),)
