"""Weights in FRACTAL_NZ, the format that the cube unit reads: brought into it once, when parameters are prepared.

Without it every product in 8 bits re-orders its weight on the way to the unit.
`npu_quant_matmul` and `npu_grouped_matmul` take it as they take a plain weight,
`npu_grouped_matmul_swiglu_quant_v2` takes nothing else.  The wheel casts by an
aclnn operator from CANN 9.1 on; before, by one of the older kind, which nothing
here has been run with, so there weights stay as they are.  So do 16-bit ones:
vllm-ascend leaves them too, unless it is told otherwise (VLLM_ASCEND_ENABLE_NZ).

A matrix [D, F] of the format is padded to blocks of 16 by 32; only one that
fills them is cast.  A tensor in the format keeps its shape, and may be turned,
but not cut.  Source: op-plugin, FormatCastKernelNpu.cpp of Ascend/pytorch, and
the pages of aclnnQuantMatmulWeightNz, aclnnGroupedMatmulWeightNz and
aclnnGroupedMatmulSwigluQuantV2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch

from mla_fx.backends.ascend.calls import release

_ND, _NZ = 2, 29
_ROWS, _COLUMNS = 16, 32  # of a block of 8-bit numbers
_SINCE = (9, 1)


def since(cann: tuple[int, int]) -> bool:
    """Whether a release has the cast."""
    return cann >= _SINCE


def fractal(weight: torch.Tensor) -> torch.Tensor:
    """The form of an 8-bit weight [.., F, D], where the release has it and blocks are full: shaped as it was."""
    features, inner = weight.shape[-2:]
    if not since(release.cann()) or not weight.numel() or inner % _ROWS or features % _COLUMNS:
        return weight
    with _allowed():
        cast: torch.Tensor = torch.ops.npu.npu_format_cast(weight.transpose(-1, -2).contiguous(), _NZ)
    return cast.transpose(-1, -2)


def is_fractal(weight: torch.Tensor) -> bool:
    """Whether a weight is in the format."""
    return bool(torch.ops.npu.get_npu_format(weight) == _NZ)


def matrix(weight: torch.Tensor) -> torch.Tensor:
    """A weight [.., F, D] as products take it, [.., D, F]: turned, where it lies."""
    turned = weight.transpose(-1, -2)
    return turned if turned.is_contiguous() else weight.contiguous().transpose(-1, -2)


def plain(weight: torch.Tensor) -> torch.Tensor:
    """A weight that may be cut: a copy, where it is in the format."""
    if not is_fractal(weight):
        return weight
    cast: torch.Tensor = torch.ops.npu.npu_format_cast(weight.transpose(-1, -2), _ND)
    return cast.transpose(-1, -2)


@contextmanager
def _allowed() -> Iterator[None]:
    """With internal formats allowed, which the wheel refuses on an A2 unless it is told; then as it was."""
    config, key = torch.npu.config, "ALLOW_INTERNAL_FORMAT"  # type: ignore[attr-defined]
    before = import_module("torch_npu")._C._npu_getOption(key)
    config.allow_internal_format = True
    try:
        yield
    finally:
        config.allow_internal_format = before == b"enable"
