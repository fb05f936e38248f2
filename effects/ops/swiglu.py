"""The gated activation of a feed-forward network.

    out[t, f] = silu(x[t, f]) * x[t, F + f]          silu(a) = a / (1 + exp(-a))

`x` is what the merged gate and up projection gives, gate first.  Source: GLU
variants (arXiv 2002.05202), as in DeepSeek-V3's `down_proj(silu(gate) * up)`.
"""

from typing import ClassVar

from attrs import frozen

from mla_fx.effects.aval import FLOATS, Aval, ShapeError, match, require_dtype
from mla_fx.effects.op import Op


@frozen
class Swiglu(Op):
    """`x` [T, 2 F] -> [T, F]."""

    operands: ClassVar = ("x",)

    def shape_rule(self, x: Aval) -> tuple[Aval, ...]:
        """Two halves of one width."""
        axes = match(self.name, x=(x, "T D"))
        require_dtype(self.name, "x", x, *FLOATS)
        if axes["D"] % 2:
            raise ShapeError(f"{self.name}: axis D of x must be even, gate and up: got {axes['D']}")
        return (Aval((axes["T"], axes["D"] // 2), x.dtype),)
