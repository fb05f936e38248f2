"""Torch's dtypes by the names that abstract values use."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

#: Name to dtype; "host" is no tensor and has none.
DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp64": torch.float64,
        "int8": torch.int8,
        "int32": torch.int32,
        "int64": torch.int64,
    }
)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, LSEs and scales beside `dtype`: float32, except beside float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
