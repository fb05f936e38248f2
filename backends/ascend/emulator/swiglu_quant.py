"""Emulated activation between two 8-bit products, behind the sums of the first or with it.

npu_dequant_swiglu_quant takes integer sums to numbers, the gated activation, and 8 bits again, by group or not:

    y = act(x * weight_scale * activation_scale)        step = max |y| / 127        q = round(y / step)

npu_grouped_matmul_swiglu_quant_v2 makes the sums itself, from rows and a matrix for each group in FRACTAL_NZ.
Source: op-plugin's page, dequant_swiglu_quant of ops-nn, and the page of aclnnGroupedMatmulSwigluQuantV2.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator.fractal import looking, reading
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


def check_product(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    weight_scales: list[torch.Tensor],
    assist: Any,
    bias: Any,
    x_scale: torch.Tensor,
    smooth: Any,
    groups: torch.Tensor,
    dequant_mode: int,
    dequant_dtype: int,
    quant_mode: int,
    group_list_type: int,
    tuning: Any,
    q: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    """int8 with a scale for each row and each feature.  The wheel asks for one weight, and for its format."""
    require(not assist and bias is None and smooth is None, "assist matrix, bias and smooth_scale are not emulated")
    modes = (dequant_mode, dequant_dtype, quant_mode)
    require(modes == (0, 0, 0), f"only dequant_mode, dequant_dtype and quant_mode 0 are emulated: got {modes}")
    require(group_list_type in (0, 1), f"group_list_type must be 0 or 1: got {group_list_type}")
    (weight,), (weight_scale,) = weights, weight_scales
    require(x.dtype == weight.dtype == torch.int8, f"x and weight must be int8: got {x.dtype} and {weight.dtype}")
    require(x.dim() == 2 and weight.dim() == 3, f"x must be [M, K], weight [E, K, N]: got {x.dim()}, {weight.dim()}")
    require(weight.is_contiguous(), "weight must not be transposed")
    experts, inner, wide = weight.shape
    require(x.shape[1] == inner, f"K must be {inner}: got {x.shape[1]}")
    require(inner % 16 == 0 and wide % 32 == 0, f"K and N must fill blocks of 16 and 32: got {inner} and {wide}")
    require(wide <= 10240 and inner < 65536, f"N must be at most 10240, K below 65536: got {wide} and {inner}")
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    require(weight_scale.dtype in kinds, f"weight_scale must be of floats: got {weight_scale.dtype}")
    require(list(weight_scale.shape) == [experts, wide], f"weight_scale must be {[experts, wide]}")
    fit = x_scale.dtype == torch.float32 and list(x_scale.shape) == [x.shape[0]]
    require(fit, f"x_scale must be float32 [{x.shape[0]}]: got {x_scale.dtype}")
    fit = groups.dtype == torch.int64 and list(groups.shape) == [experts]
    require(fit, f"group_list must be int64 [{experts}]: got {groups.dtype}")


def run_product(x: torch.Tensor, weights: list[torch.Tensor], scales: list[torch.Tensor], *rest: Any) -> None:
    """Integer sums, then as the other.  Rows behind the groups are not written."""
    x_scale, groups, group_list_type, q, scale = rest[2], rest[4], rest[8], rest[-2], rest[-1]
    counts = groups if group_list_type == 1 else groups.diff(prepend=torch.zeros(1, dtype=torch.int64))
    group = torch.arange(len(counts)).repeat_interleave(counts)
    sums = torch.zeros(x.shape[0], weights[0].shape[2], dtype=torch.int32)
    for number, matrix in enumerate(weights[0]):
        rows = (group == number).nonzero().flatten()
        sums[rows] = torch.matmul(x[rows].int(), matrix.int())
    run(sums, scales[0].float(), x_scale, None, None, None, counts, True, "dynamic", 0, q, scale)


#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "aclnnDequantSwigluQuantV2": Operator("T T T T T T T b s i64 s i64 i64 d d d O O", run, check),
        "aclnnGroupedMatmulSwigluQuantWeightNzV2": Operator(
            "T L L L T T T T i64 i64 i64 i64 I O O", reading(run_product), looking(check_product), fractal=True
        ),
    }
)
