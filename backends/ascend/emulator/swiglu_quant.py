"""Emulated npu_dequant_swiglu_quant: integer sums to numbers, the gated activation, and 8 bits again, by group or not.

    y = act(x * weight_scale * activation_scale)        step = max |y| / 127        q = round(y / step)

Source: op-plugin's page, and dequant_swiglu_quant of ops-nn.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator.operator import Operator, require, tiling
from mla_fx.backends.ascend.emulator.quant import quantised

#: Of the last axis in groups: the page of aclnnDequantSwigluQuantV2 has no more, the one of op-plugin 10496.
_WIDEST, _MULTIPLE = 7232, 64


def check(
    x: torch.Tensor,
    weight_scale: torch.Tensor | None,
    activation_scale: torch.Tensor | None,
    bias: Any,
    quant_scale: Any,
    quant_offset: Any,
    groups: torch.Tensor | None,
    left: bool,
    quant_mode: str | None,
    *rest: Any,
) -> None:
    """int32 with both scales, to dynamic int8; the wheel asks for two axes and an even last one."""
    require(x.dtype == torch.int32 and x.dim() == 2, f"only x int32 [Z, 2 H] is emulated: got {x.dtype}")
    require(bias is quant_scale is quant_offset is None, "bias, quant_scale and quant_offset are not emulated")
    require(quant_mode == "dynamic", f"quant_mode: only dynamic is emulated: got {quant_mode}")
    require(rest[3] == 0, f"swiglu_mode: only 0 is emulated: got {rest[3]}")
    require(weight_scale is not None, "without weight_scale: not emulated")
    require(activation_scale is not None, "activation_scale is needed for int32")
    assert weight_scale is not None and activation_scale is not None
    wide, number = x.shape[1], activation_scale.numel()
    scales = [wide]
    if groups is not None:
        kind = groups.dtype
        tiling(kind == torch.int64 and groups.dim() == 1, f"group_index must be int64 [groups]: got {kind}")
        scales = [groups.shape[0], wide]
        tiling(wide <= _WIDEST, f"2 H must be at most {_WIDEST} in groups: got {wide}")
    tiling(wide % _MULTIPLE == 0, f"2 H must be a multiple of {_MULTIPLE}: got {wide}")
    tiling(weight_scale.dtype == torch.float32, f"weight_scale must be float32: got {weight_scale.dtype}")
    tiling(list(weight_scale.shape) == scales, f"weight_scale must be {scales}: got {list(weight_scale.shape)}")
    tiling(activation_scale.dtype == torch.float32, f"activation_scale must be float32: got {activation_scale.dtype}")
    tiling(number == x.shape[0], f"activation_scale must have {x.shape[0]} numbers: got {number}")


def run(x: torch.Tensor, weight_scale: torch.Tensor, activation_scale: torch.Tensor, *rest: Any) -> None:
    """In float32.  Rows behind the groups are not written."""
    groups, left, q, scale = rest[3], rest[4], rest[-2], rest[-1]
    if groups is None:
        weight_scale, groups = weight_scale.unsqueeze(0), [len(x)]
    numbers = [int(number) for number in groups]
    if min(numbers) < 0 or sum(numbers) > x.shape[0]:
        raise IndexError(f"group_index: must be at least 0 and at most {x.shape[0]} together: got {numbers}")
    end = 0
    for group, count in enumerate(numbers):
        start, end = end, end + count
        wide = x[start:end].float() * weight_scale[group] * activation_scale.reshape(-1)[start:end].unsqueeze(1)
        gate, up = wide.chunk(2, 1) if left else reversed(wide.chunk(2, 1))
        quantised(gate / (1 + torch.exp(-gate)) * up, q[start:end], scale[start:end])


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "aclnnDequantSwigluQuantV2": Operator("T T T T T T T b s i64 s i64 i64 d d d O O", run, check),
    }
)
