"""The table of emulated operators, by the names under which the wheel looks them up.

The everyday ones are here, a line each; attention has a file of its own.  An
operator that is not in the table is refused by the wheel itself, which names it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator import attention, experts, fused, quant
from mla_fx.backends.ascend.emulator.operator import Operator


def _matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, cube_math_type: int) -> None:
    """Products of 16-bit numbers are added up in float32, as the cube unit does."""
    out.copy_(torch.matmul(a.float(), b.float()))


def _family(name: str, function: Callable[[Any, Any], torch.Tensor]) -> dict[str, Operator]:
    """The four forms of a binary operator.  The wheel takes one only where all are there."""
    return {
        f"aclnn{name}": Operator("T T O", lambda a, b, out: out.copy_(function(a, b))),
        f"aclnn{name}s": Operator("T S O", lambda a, b, out: out.copy_(function(a, b))),
        f"aclnnInplace{name}": Operator("T T", lambda a, b: a.copy_(function(a, b))),
        f"aclnnInplace{name}s": Operator("T S", lambda a, b: a.copy_(function(a, b))),
    }


def _scaled_family(name: str, sign: int) -> dict[str, Operator]:
    """Addition and subtraction have a factor on the second operand."""
    return {
        f"aclnn{name}": Operator("T T S O", lambda a, b, alpha, out: out.copy_(a + sign * alpha * b)),
        f"aclnn{name}s": Operator("T S S O", lambda a, b, alpha, out: out.copy_(a + sign * alpha * b)),
        f"aclnnInplace{name}": Operator("T T S", lambda a, b, alpha: a.copy_(a + sign * alpha * b)),
        f"aclnnInplace{name}s": Operator("T S S", lambda a, b, alpha: a.copy_(a + sign * alpha * b)),
    }


def _index_select(source: torch.Tensor, axis: int, index: torch.Tensor, out: torch.Tensor) -> None:
    """An index out of range is a fault on the device, as torch raises it."""
    out.copy_(torch.index_select(source, axis, index.long()))


def _scatter_value(a: torch.Tensor, axis: int, index: torch.Tensor, value: Any, reduction: int, out: Any) -> None:
    out.copy_(a.scatter(axis, index, value))


def _sort(a: torch.Tensor, stable: bool, axis: int, descending: bool, values: Any, indices: Any) -> None:
    """Unless it is asked to be stable, equal numbers come in the order that is least expected."""
    if stable:
        found, index = a.sort(stable=True, dim=axis, descending=descending)
    else:
        found, index = a.flip(axis).sort(stable=True, dim=axis, descending=descending)
        index = a.shape[axis] - 1 - index
    values.copy_(found)
    indices.copy_(index)


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "aclnnMatmul": Operator("T T O i8", _matmul),
        "aclnnMm": Operator("T T O i8", _matmul),
        "aclnnBatchMatMul": Operator("T T O i8", _matmul),
        **_scaled_family("Add", 1),
        **_scaled_family("Sub", -1),
        "aclnnRsub": Operator("T T S O", lambda a, b, alpha, out: out.copy_(b - alpha * a)),
        "aclnnRsubs": Operator("T S S O", lambda a, b, alpha, out: out.copy_(b - alpha * a)),
        **_family("Mul", torch.mul),
        **_family("Div", torch.div),
        **_family("FloorDivide", torch.floor_divide),
        "aclnnNeg": Operator("T O", lambda a, out: out.copy_(-a)),
        "aclnnExp": Operator("T O", lambda a, out: out.copy_(a.exp())),
        "aclnnEqScalar": Operator("T S O", lambda a, b, out: out.copy_(a == b)),
        "aclnnBitwiseOrTensor": Operator("T T O", lambda a, b, out: out.copy_(a | b)),
        "aclnnAll": Operator("T I b O", lambda a, axes, keep, out: out.copy_(torch.all(a, axes, keep))),
        "aclnnLogSumExp": Operator("T I b O", lambda a, axes, keep, out: out.copy_(torch.logsumexp(a, axes, keep))),
        "aclnnCast": Operator("T i32 O", lambda a, dtype, out: out.copy_(a)),
        "aclnnInplaceCopy": Operator("O T", lambda out, a: out.copy_(a)),
        "aclnnCat": Operator("L i64 O", lambda parts, axis, out: out.copy_(torch.cat(parts, axis))),
        "aclnnStack": Operator("L i64 O", lambda parts, axis, out: out.copy_(torch.stack(parts, axis))),
        "aclnnIndexSelect": Operator("T i64 T O", _index_select),
        "aclnnTriu": Operator("T i64 O", lambda a, diagonal, out: out.copy_(torch.triu(a, diagonal))),
        "aclnnInplaceMaskedFillScalar": Operator("T T S", lambda a, mask, value: a.masked_fill_(mask, value)),
        "aclnnInplaceFillScalar": Operator("O S", lambda out, value: out.fill_(value)),
        "aclnnInplaceZero": Operator("O", lambda out: out.zero_()),
        "aclnnInplaceOne": Operator("O", lambda out: out.fill_(1)),
        "aclnnAbs": Operator("T O", lambda a, out: out.copy_(a.abs())),
        "aclnnRound": Operator("T O", lambda a, out: out.copy_(a.round())),
        # Not torch.sigmoid, whose last bits depend on where in a row a number lies.
        "aclnnSigmoid": Operator("T O", lambda a, out: out.copy_(1 / (1 + torch.exp(-a)))),
        "aclnnSoftmax": Operator("T i64 O", lambda a, axis, out: out.copy_(torch.softmax(a, axis))),
        "aclnnAmax": Operator("T I b O", lambda a, axes, keep, out: out.copy_(torch.amax(a, axes, keep))),
        "aclnnReduceSum": Operator("T I b i32 O", lambda a, axes, keep, kind, out: out.copy_(a.sum(axes, keep))),
        "aclnnArgMax": Operator("T i64 b O", lambda a, axis, keep, out: out.copy_(a.argmax(axis, keep))),
        "aclnnCumsum": Operator("T i64 i32 O", lambda a, axis, kind, out: out.copy_(a.cumsum(axis))),
        "aclnnArange": Operator("S S S O", lambda start, end, step, out: out.copy_(torch.arange(start, end, step))),
        "aclnnLtScalar": Operator("T S O", lambda a, b, out: out.copy_(a < b)),
        "aclnnGeScalar": Operator("T S O", lambda a, b, out: out.copy_(a >= b)),
        "aclnnGeTensor": Operator("T T O", lambda a, b, out: out.copy_(a >= b)),
        "aclnnLeTensor": Operator("T T O", lambda a, b, out: out.copy_(a <= b)),
        "aclnnNeTensor": Operator("T T O", lambda a, b, out: out.copy_(a != b)),
        "aclnnClamp": Operator("T S S O", lambda a, low, high, out: out.copy_(a.clamp(low, high))),
        "aclnnSWhere": Operator("T T T O", lambda mask, a, b, out: out.copy_(torch.where(mask, a, b))),
        "aclnnGather": Operator("T i64 T O", lambda a, axis, index, out: out.copy_(a.gather(axis, index))),
        "aclnnScatterValue": Operator("T i64 T S i64 O", _scatter_value),
        "aclnnSort": Operator("T b i64 b O O", _sort),
        **attention.OPERATORS,
        **experts.OPERATORS,
        **fused.OPERATORS,
        **quant.OPERATORS,
    }
)
