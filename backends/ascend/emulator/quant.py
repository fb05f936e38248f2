"""Emulated 8-bit operators: quantisation of each row as it comes, and the product with its scales."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from mla_fx.backends.ascend.emulator.fractal import looking, reading
from mla_fx.backends.ascend.emulator.operator import Operator, require, tiling


def check_dynamic_quant(
    x: torch.Tensor, smooth: Any, groups: Any, kind: int, q: torch.Tensor, scale: torch.Tensor, offset: Any
) -> None:
    """float16 and bfloat16; only symmetric int8 is emulated.  The wheel asks for two axes or more."""
    require(x.dtype in (torch.float16, torch.bfloat16), f"x must be float16 or bfloat16: got {x.dtype}")
    require(x.numel() > 0, "x must not be empty")
    require(smooth is groups is offset is None and q.dtype == torch.int8, "only plain int8 is emulated")


def run_dynamic_quant(
    x: torch.Tensor, smooth: Any, groups: Any, kind: int, q: torch.Tensor, scale: torch.Tensor, offset: Any
) -> None:
    """In float32."""
    quantised(x.float(), q, scale)


def quantised(wide: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
    """Rows in steps of a 127th of their largest: `wide` float32 [..., D] into `q` int8 [..., D] and `scale` [...].

    A row of zeros has scale 0, and what it is in steps of 0 no page says: it stays unwritten.
    """
    step = wide.abs().amax(-1) / 127
    some = step != 0
    q[some] = torch.round(wide / step.unsqueeze(-1))[some].nan_to_num(0, 127, -128).to(torch.int8)
    scale.copy_(step)


def check_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    x1_scale: torch.Tensor | None,
    x2_scale: torch.Tensor,
    y_scale: Any,
    x1_offset: Any,
    x2_offset: Any,
    y_offset: Any,
    bias: Any,
    transpose1: bool,
    transpose2: bool,
    group_size: int,
    out: torch.Tensor,
) -> None:
    """int8 with a scale for each token, to bf16 or fp16, or sums as they are; nothing empty, last axes below 65536."""
    require(x1.dtype == x2.dtype == torch.int8, f"x1 and x2 must be int8: got {x1.dtype} and {x2.dtype}")
    require(x1.dim() == x2.dim() == 2 and x1.shape[1] == x2.shape[0], f"x1 [M, K], x2 [K, N]: got {list(x2.shape)}")
    require(x1.numel() > 0 and x2.numel() > 0, "x1 and x2 must not be empty")
    require(x1.is_contiguous(), f"x1 must be contiguous: got strides {x1.stride()}")
    require(x2.is_contiguous() or x2.t().is_contiguous(), f"x2 must be contiguous or transposed: got {x2.stride()}")
    last = max(x1.shape[1], x2.shape[1])
    tiling(last <= 65535, f"the last axes of x1 and x2 must be at most 65535: got {last}")
    require(not transpose1 and not transpose2 and group_size == 0, "transpose flags and groups are not emulated")
    require(y_scale is x2_offset is bias is None, "y_scale, offset and bias are not emulated")
    require(list(x2_scale.shape) in ([1], [x2.shape[1]]), f"scale must be [1] or [{x2.shape[1]}]")
    if out.dtype == torch.int32:
        require(x1_scale is None, "pertoken_scale is for results that are no sums")
        return
    require(x1_scale is not None, "without a scale for each token: not emulated")
    assert x1_scale is not None
    shape = [x1.shape[0]]
    require(
        x1_scale.dtype == torch.float32 and list(x1_scale.shape) == shape, f"pertoken_scale must be float32 {shape}"
    )
    wanted = {torch.bfloat16: (torch.float32, torch.bfloat16), torch.float16: (torch.float32,)}
    require(out.dtype in wanted, f"out must be float16, bfloat16 or int32: got {out.dtype}")
    require(x2_scale.dtype in wanted[out.dtype], f"scale beside {out.dtype}: got {x2_scale.dtype}")


def run_quant_matmul(x1: torch.Tensor, x2: torch.Tensor, x1_scale: torch.Tensor | None, *rest: Any) -> None:
    """Integer sums, as int32 as they are, else with both scales in float32, rounded once."""
    x2_scale, out, sums = rest[0], rest[-1], torch.matmul(x1.int(), x2.int())
    out.copy_(sums if x1_scale is None else sums.float() * x2_scale.float() * x1_scale.unsqueeze(1))


_QUANT_MATMUL: Final = "T T T T T T T T T b b i64 O"
#: Name to operator.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType(
    {
        "aclnnDynamicQuantV2": Operator("T T T i32 O O O", run_dynamic_quant, check_dynamic_quant),
        "aclnnQuantMatmulV5": Operator(_QUANT_MATMUL, run_quant_matmul, check_quant_matmul),
        "aclnnQuantMatmulWeightNz": Operator(
            _QUANT_MATMUL, reading(run_quant_matmul), looking(check_quant_matmul), fractal=True
        ),
    }
)
