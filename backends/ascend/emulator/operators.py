"""The table of emulated operators, by the names under which the wheel looks them up.

The everyday ones are here, a line each; attention has a file of its own.  An
operator that is not in the table is refused by the wheel itself, which names it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator import attention, fused
from mla_fx.backends.ascend.emulator.operator import Operator


def _matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, cube_math_type: int) -> None:
    """Products of 16-bit numbers are added up in float32, as the cube unit does."""
    out.copy_(torch.matmul(a.float(), b.float()))


def _binary(function: Any) -> Operator:
    return Operator("T T O", lambda a, b, out: out.copy_(function(a, b)))


def _unary(function: Any) -> Operator:
    return Operator("T O", lambda a, out: out.copy_(function(a)))


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "aclnnMatmul": Operator("T T O i8", _matmul),
        "aclnnMm": Operator("T T O i8", _matmul),
        "aclnnBatchMatMul": Operator("T T O i8", _matmul),
        "aclnnAdd": Operator("T T S O", lambda a, b, alpha, out: out.copy_(a + alpha * b)),
        "aclnnAdds": Operator("T S S O", lambda a, b, alpha, out: out.copy_(a + alpha * b)),
        "aclnnInplaceAdd": Operator("T T S", lambda a, b, alpha: a.copy_(a + alpha * b)),
        "aclnnMul": _binary(torch.mul),
        "aclnnInplaceCopy": Operator("O T", lambda out, a: out.copy_(a)),
        "aclnnCat": Operator("L i64 O", lambda parts, axis, out: out.copy_(torch.cat(parts, axis))),
        "aclnnInplaceFillScalar": Operator("O S", lambda out, value: out.fill_(value)),
        "aclnnInplaceZero": Operator("O", lambda out: out.zero_()),
        "aclnnExp": _unary(torch.exp),
        **attention.OPERATORS,
        **fused.OPERATORS,
    }
)
