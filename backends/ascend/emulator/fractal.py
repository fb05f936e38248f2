"""FRACTAL_NZ, the format of matrices that the cube unit reads: columns of blocks, of 16 rows and 32 bytes each.

    stored[.., n / c0, k / 16, k % 16, n % c0] = matrix[.., k, n]        c0 = 32 bytes

Blocks that the matrix does not fill are filled up with zeros.  A tensor in this
format keeps its shape and strides; only operators that ask for the format can
read it.  Source: aclnnNpuFormatCast of ops-math, its page.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from attrs import frozen

from mla_fx.backends.ascend.emulator.operator import Operator, RefusedError, require

#: Its number.
FORMAT: Final = 29
_ROWS, _BYTES = 16, 32


@frozen(eq=False)
class Fractal:
    """A tensor in FRACTAL_NZ: `stored` is its memory, [.., N / c0, K / 16, 16, c0]; shape, strides are the view's."""

    stored: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        return self.stored.dtype

    @property
    def turned(self) -> bool:
        """Whether the view is the matrix transposed; raises `RefusedError` for a view of any other kind."""
        whole = torch.empty(self.shape, device="meta")
        if self.strides == whole.stride():
            return False
        other = torch.empty((*self.shape[:-2], self.shape[-1], self.shape[-2]), device="meta").transpose(-1, -2)
        if self.strides != other.stride():
            raise RefusedError(f"a view of FRACTAL_NZ must be whole, or transposed: got strides {self.strides}")
        return True

    def read(self) -> torch.Tensor:
        """The view, as a tensor of its own."""
        turned = self.turned
        *_, rows, features = (*self.shape[:-2], self.shape[-1], self.shape[-2]) if turned else self.shape
        blocks = self.stored.transpose(-4, -3).transpose(-3, -2)
        whole = blocks.reshape(*blocks.shape[:-4], blocks.shape[-4] * _ROWS, -1)[..., :rows, :features]
        return whole.transpose(-1, -2) if turned else whole

    def write(self, matrix: torch.Tensor) -> None:
        """Put a matrix of the whole shape into the memory."""
        *_, columns, bands, _, wide = self.stored.shape
        padded = matrix.new_zeros((*matrix.shape[:-2], bands * _ROWS, columns * wide))
        padded[..., : matrix.shape[-2], : matrix.shape[-1]] = matrix
        blocks = padded.view(*matrix.shape[:-2], bands, _ROWS, columns, wide)
        self.stored.copy_(blocks.transpose(-3, -2).transpose(-4, -3))


def memory(tensor: Fractal, operator: Operator) -> torch.Tensor:
    """The memory of a tensor in the format, for an operator that takes it."""
    require(operator.fractal, "tensors must be in the format ND: got FRACTAL_NZ")
    return tensor.stored


def plain(tensor: Any) -> Any:
    """What an operator for either format reads."""
    return tensor.read() if isinstance(tensor, Fractal) else tensor


def reading(run: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's `run` that gets what is in the format as plain tensors, in lists too."""
    return lambda *arguments: run(*map(_each(plain), arguments))


def looking(check: Callable[..., None]) -> Callable[..., None]:
    """An operator's `check` that gets of what is in the format shape, strides and dtype, as a tensor without data."""
    return lambda *arguments: check(*map(_each(_outline), arguments))


def _each(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda given: [*map(function, given)] if isinstance(given, list) else function(given)


def _outline(tensor: Any) -> Any:
    if not isinstance(tensor, Fractal):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.strides, dtype=tensor.dtype, device="meta")


def check_cast(source: Any, out: Any) -> None:
    """From one format to the other.  (What is no whole tensor the wheel casts in another way.)"""
    kinds = (isinstance(source, Fractal), isinstance(out, Fractal))
    require(kinds[0] != kinds[1], "only casts to FRACTAL_NZ and back are emulated")


def run_cast(source: Any, out: Any) -> None:
    """The same numbers."""
    if isinstance(out, Fractal):
        out.write(source)
    else:
        out.copy_(source.read())


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {"aclnnNpuFormatCast": Operator("T O", run_cast, check_cast, fractal=True)}
)
