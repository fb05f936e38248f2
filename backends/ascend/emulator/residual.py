"""Emulated npu_add_rms_norm: a sum, and the norm of it as it was rounded; with its refusals.

Source: aclnnAddRmsNorm of ops-nn.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from mla_fx.backends.ascend.emulator.operator import FLOATS, Operator, require

_Tensor = torch.Tensor


def check(x1: _Tensor, x2: _Tensor, gamma: _Tensor, epsilon: float, y: _Tensor, rstd: _Tensor, x: _Tensor) -> None:
    """One dtype and shape of both addends; gamma has the dtype, and its shape ends theirs."""
    require(x1.dtype in FLOATS, f"x1 must be float16, bfloat16 or float32: got {x1.dtype}")
    require(x2.dtype == gamma.dtype == x1.dtype, f"x2 and gamma must be {x1.dtype}: got {x2.dtype}, {gamma.dtype}")
    require(x2.shape == x1.shape, f"x2 must be {list(x1.shape)}: got {list(x2.shape)}")
    ends = list(x1.shape[x1.dim() - gamma.dim() :])
    require(ends == list(gamma.shape), f"gamma must be {ends}: got {list(gamma.shape)}")


def run(x1: _Tensor, x2: _Tensor, gamma: _Tensor, epsilon: float, y: _Tensor, rstd: _Tensor, x: _Tensor) -> None:
    """In float32; the sum is rounded before its norm is taken, and the norm is rounded once."""
    x.copy_(x1.float() + x2.float())
    axes = list(range(x.dim() - gamma.dim(), x.dim()))
    root = torch.rsqrt(x.float().square().mean(axes, keepdim=True) + epsilon)
    y.copy_(x.float() * root * gamma.float())
    rstd.copy_(root.view(rstd.shape))


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType({"aclnnAddRmsNorm": Operator("T T T d O O O", run, check)})
